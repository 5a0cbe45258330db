"""The shipped ontology with the information of the shipped train proteins, and answers to score on it."""

import json
from functools import lru_cache

from harness.envs.bioreason_go.information import information
from harness.envs.bioreason_go.ontology import load_shipped
from harness.envs.bioreason_go.records import load_shipped_records
from harness.envs.bioreason_go.terms import ASPECTS
from harness.envs.bioreason_go.verifier import Scorer

KINASE, TYROSINE_KINASE, BINDING, ATP = "GO:0004672", "GO:0004713", "GO:0005515", "GO:0005524"
PHOSPHORYLATION, SIGNALLING, APOPTOSIS = "GO:0006468", "GO:0007169", "GO:0006915"
NUCLEUS, MEMBRANE = "GO:0005634", "GO:0005886"
ROOTS = {"mf": "GO:0003674", "bp": "GO:0008150", "cc": "GO:0005575"}
LABELS = {
    "mf": [TYROSINE_KINASE, ATP],
    "bp": [PHOSPHORYLATION, SIGNALLING],
    "cc": [MEMBRANE],
}
UNKNOWN, OBSOLETE = "GO:9999999", "GO:0000005"


@lru_cache(maxsize=1)
def information_of_train():
    """Return the information of the shipped train labels."""
    return information(
        load_shipped(),
        [
            [load_shipped().lookup[go_id] for aspect in ASPECTS for go_id in record.labels[aspect]]
            for record in load_shipped_records()
            if record.split == "train"
        ],
    )


@lru_cache(maxsize=1)
def scorer():
    """Return a scorer with the default weights."""
    return Scorer(load_shipped(), information_of_train())


def reply(summary="A kinase.", **lists):
    """Return an answer in the required form; aspects that are not named are empty."""
    return json.dumps({"summary": summary, **{aspect: lists.get(aspect, []) for aspect in ASPECTS}})


def score(text, labels=None, **kwargs):
    """Score a reply against `LABELS` or others."""
    return scorer().score_reply(text, scorer().gold(LABELS if labels is None else labels), **kwargs)
