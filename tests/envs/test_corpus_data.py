"""The embedded corpus: facts have a source that says so, phrasings keep their rules, the check script notices."""

import importlib.util
import os
import re
import sys
import tomllib
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

from harness.envs.drugprot.labels import LABELS, RARE_LABELS

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "harness" / "envs" / "drugprot" / "data"
SHARED = Path(os.environ.get("HARNESS_SHARED_DATA") or ROOT.parent / "shared" / "data")
FREQUENT = tuple(label for label in LABELS if label not in RARE_LABELS)

spec = importlib.util.spec_from_file_location("check_corpus", ROOT / "scripts" / "check_corpus.py")
assert spec is not None
assert spec.loader is not None
check_corpus = importlib.util.module_from_spec(spec)
sys.modules["check_corpus"] = check_corpus
spec.loader.exec_module(check_corpus)

FACTS = check_corpus.read_facts(DATA / "facts.tsv")
PHRASINGS = tomllib.loads((DATA / "phrasings.toml").read_text(encoding="utf-8"))
SPLITS = ("train", "heldout")

GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "κ": "kappa", "μ": "mu", "ω": "omega",
}  # fmt: skip
GENERIC = {
    "drug", "drugs", "compound", "compounds", "inhibitor", "inhibitors", "agonist", "agonists", "antagonist",
    "antagonists", "amino acid", "amino acids", "nucleotide", "nucleotides", "steroid", "steroids", "steroidal",
    "hormone", "hormones", "acid", "metal", "enzyme", "enzymes", "protein", "proteins", "receptor", "receptors",
    "kinase", "kinases", "cytokine", "cytokines", "reductase", "dehydrogenase", "ion channel", "cytochrome",
}  # fmt: skip
MUTANT = re.compile(r"[ACDEFGHIKLMNPQRSTVWY]\d{2,4}[ACDEFGHIKLMNPQRSTVWY]")
OWN_WORD = {  # the plain words a label's own templates may use, and in what share of a list
    "AGONIST": ("agonist", 0.5),
    "AGONIST-ACTIVATOR": ("agonist", 0.5),
    "AGONIST-INHIBITOR": ("agonist", 0.5),
    "ANTAGONIST": ("antagonist", 0.5),
    "SUBSTRATE": ("substrate", 1.0),
}
LABEL_WORDS = re.compile(r"\b(?:agonist|antagonist|activator|inhibitor|substrate|\w*regulator|product)s?\b")


def loose(name: str) -> str:
    """Fold spelling variants: case, Greek letters, punctuation, a plural s."""
    text = "".join(GREEK.get(char, char) for char in unicodedata.normalize("NFC", name).casefold())
    text = re.sub(r"[\s\-()\[\],.]", "", text)
    return text[:-1] if len(text) > 4 and text.endswith("s") else text


def five_grams(template: str) -> set[tuple[str, ...]]:
    """Return the runs of five words between placeholders, without case and punctuation."""
    grams = set()
    for part in re.split(r"\{\w+\}", template.lower()):
        words = re.findall(r"\w+(?:['./-]\w+)*", part)
        grams |= {tuple(words[i : i + 5]) for i in range(len(words) - 4)}
    return grams


def test_facts_are_well_formed():
    for fact in FACTS:
        assert fact.relation in LABELS, fact
        assert re.fullmatch(r"PMID:[1-9]\d{5,7}", fact.source), fact
        for name in (fact.chemical, fact.protein):
            assert 3 <= len(name) <= 40, fact
            assert name == " ".join(unicodedata.normalize("NFC", name).split()), fact
            assert not set("{}|\\") & set(name), fact
            assert name.casefold() not in GENERIC, fact
        assert not MUTANT.fullmatch(fact.protein), fact
        assert "\t" not in fact.note, fact


def test_facts_are_sorted_and_distinct_even_when_spelt_otherwise():
    keys = [(fact.chemical.casefold(), fact.protein.casefold(), fact.relation) for fact in FACTS]
    assert keys == sorted(keys)
    pairs = Counter((loose(fact.chemical), loose(fact.protein)) for fact in FACTS)
    assert [pair for pair, count in pairs.items() if count > 1] == []


def test_the_duplicate_test_folds_spellings():
    assert loose("alpha 1A-adrenoceptors") == loose("α(1A)-adrenoceptor")
    assert loose("5-HT2A") != loose("5-HT2C")


def test_the_corpus_is_large_and_covers_every_frequent_label():
    labels = Counter(fact.relation for fact in FACTS)
    assert len(FACTS) >= 400
    for label in FREQUENT:
        assert 25 <= labels[label] <= 90, label
    # a quarter of every label's pairs can be held out
    assert sum(count // 4 for count in labels.values()) >= 120


def test_the_data_card_gives_the_counts():
    card = (DATA / "README.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"\| ([A-Z-]+) \| (\d+)(?= \|)", card))
    assert {label: int(count) for label, count in stated.items()} == Counter(fact.relation for fact in FACTS)
    assert f"{len(FACTS)} facts from {len({fact.source for fact in FACTS})} documents" in card


def test_every_label_has_enough_phrasings():
    assert set(PHRASINGS) == {"background", *LABELS}
    for name, lists in PHRASINGS.items():
        assert set(lists) == set(SPLITS), name
        assert len(set(lists["train"])) == len(lists["train"]) >= 8, name
        assert len(set(lists["heldout"])) == len(lists["heldout"]) >= 5, name


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("split", SPLITS)
def test_templates_state_the_relation_without_naming_the_label(label, split):
    templates = PHRASINGS[label][split]
    own, share = OWN_WORD.get(label, ("", 0.0))
    for template in templates:
        assert template.count("{chemical}") == template.count("{protein}") == 1, template
        assert set(re.findall(r"\{(\w+)\}", template)) == {"chemical", "protein"}, template
        assert 25 <= len(template.split()) <= 45, (len(template.split()), template)
        assert template.endswith("."), template
        assert len(re.findall(r"[.!?] [A-Z]", template)) <= 1, template  # one or two sentences
        assert not re.search(r"(?:^|[.!?] )\{", template), template  # a name may be in lower case
        assert not re.search(r"\b(?:an?|the) \{(?:protein|chemical)\}", template) or label == "PART-OF", template
        words = {word.rstrip("s") for word in LABEL_WORDS.findall(template.lower())}
        assert words <= {own}, (words, template)
    assert sum(own in template.lower() for template in templates if own) <= share * len(templates)


@pytest.mark.parametrize("split", SPLITS)
def test_openings_are_short_and_name_no_relation(split):
    hint = re.compile(
        r"\{|bind|inhibit|block|activat|stimulat|agonis|regulat|express|substrate|metaboli|residue|enzyme"
    )
    for opening in PHRASINGS["background"][split]:
        assert 8 <= len(opening.split()) <= 15, opening
        assert not hint.search(opening.lower()), opening


@pytest.mark.parametrize("name", sorted(PHRASINGS))
def test_heldout_phrasings_are_no_near_copies(name):
    train = set().union(*map(five_grams, PHRASINGS[name]["train"]))
    heldout = set().union(*map(five_grams, PHRASINGS[name]["heldout"]))
    assert train & heldout == set()


def test_no_template_stands_under_two_labels():
    owners = Counter(text for lists in PHRASINGS.values() for split in SPLITS for text in set(lists[split]))
    assert max(owners.values()) == 1


@pytest.fixture
def toy(tmp_path):
    """Write two facts' worth of gold annotation: aspirin/COX-1 twice, caffeine/ADORA2A with two relations."""
    folder = tmp_path / "drugprot" / "bioc_train_subset"
    folder.mkdir(parents=True)
    names = [("1111111", "Aspirin", "COX-1"), ("2222222", "caffeine", "ADORA2A"), ("3333333", "Caffeine", "adora2a")]
    entities = [
        f"{pmid}\tT{number}\tX\t0\t1\t{name}\n"
        for pmid, *pair in names
        for number, name in enumerate(pair, start=1)
    ]  # fmt: skip
    relations = [("1111111", "INHIBITOR"), ("2222222", "ANTAGONIST"), ("3333333", "DIRECT-REGULATOR")]
    (folder / "entities.tsv").write_text("".join(entities))
    (folder / "relations.tsv").write_text("".join(f"{p}\t{r}\tArg1:T1\tArg2:T2\n" for p, r in relations))
    other = tmp_path / "drugprot" / "official_toy"
    other.mkdir()
    (other / "gs_entities.tsv").write_text("")
    (other / "gs_relations.tsv").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("aspirin\tcox-1\tINHIBITOR\tPMID:1111111\t", None),
        ("aspirin\tcox-1\tINHIBITOR\tPMID:1111111", None),
        ("aspirin\tcox-1\tACTIVATOR\tPMID:1111111\t", "no ACTIVATOR between these names in document 1111111"),
        ("aspirin\tcox-1\tINHIBITOR\tPMID:2222222\t", "no INHIBITOR between these names in document 2222222"),
        ("aspirin\tCOX1\tINHIBITOR\tPMID:1111111\t", "no INHIBITOR between these names"),
        ("aspirin\tcox-1\tINHIBITOR\thttps://example.org/a\t", "cannot be looked up"),
        ("caffeine\tADORA2A\tANTAGONIST\tPMID:2222222\t", "also annotated as DIRECT-REGULATOR"),
    ],
)
def test_the_script_lists_what_it_cannot_verify(toy, capsys, line, reason):
    facts = toy / "facts.tsv"
    facts.write_text("\t".join(check_corpus.COLUMNS) + f"\n{line}\n")
    code = check_corpus.main(["--facts", str(facts), "--data", str(toy)])
    printed = capsys.readouterr().out
    assert code == (0 if reason is None else 1)
    assert (reason or "1 verified, 0 unverified") in printed


def test_the_script_tells_bad_files_from_absent_ones(toy, capsys):
    facts = toy / "facts.tsv"
    facts.write_text("chemical\tprotein\n")
    assert check_corpus.main(["--facts", str(facts), "--data", str(toy)]) == 2
    facts.write_text("\t".join(check_corpus.COLUMNS) + "\na\tb\n")
    assert check_corpus.main(["--facts", str(facts), "--data", str(toy)]) == 2
    assert "2 columns" in capsys.readouterr().err
    assert check_corpus.main(["--data", str(toy / "nowhere")]) == 3
    assert "HARNESS_SHARED_DATA" in capsys.readouterr().err
    (toy / "drugprot" / "bioc_train_subset" / "relations.tsv").write_text("1111111\tINHIBITOR\tArg1:T9\tArg2:T2\n")
    assert check_corpus.main(["--data", str(toy)]) == 2


def test_every_fact_stands_in_the_shared_data(capsys):
    if not (SHARED / "drugprot").is_dir():
        pytest.skip(f"no DrugProt files under {SHARED}; set HARNESS_SHARED_DATA")
    assert check_corpus.main(["--data", str(SHARED)]) == 0, capsys.readouterr().out


def test_every_source_is_one_of_the_463_documents():
    abstracts = SHARED / "drugprot" / "bioc_train_subset" / "abstracts.tsv"
    if not abstracts.is_file():
        pytest.skip(f"no DrugProt files under {SHARED}; set HARNESS_SHARED_DATA")
    with abstracts.open(encoding="utf-8", newline="\n") as file:
        documents = {f"PMID:{line.split(chr(9), 1)[0]}" for line in file}
    assert {fact.source for fact in FACTS} <= documents


def test_no_phrasing_is_copied_from_an_abstract():
    abstracts = SHARED / "drugprot" / "bioc_train_subset" / "abstracts.tsv"
    if not abstracts.is_file():
        pytest.skip(f"no DrugProt files under {SHARED}; set HARNESS_SHARED_DATA")
    text = " ".join(re.findall(r"\w+(?:['./-]\w+)*", abstracts.read_text(encoding="utf-8").lower()))
    for lists in PHRASINGS.values():
        for template in (*lists["train"], *lists["heldout"]):
            for part in re.split(r"\{\w+\}", template.lower()):
                words = re.findall(r"\w+(?:['./-]\w+)*", part)
                for start in range(len(words) - 7):
                    assert " ".join(words[start : start + 8]) not in text, template
