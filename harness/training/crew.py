"""Sampling and training by several processes of one machine, with what one process alone would give.

Process 0 decides everything and tells the others what to do: play some tasks, or add their part of a gradient. A
task's random numbers belong to its address and not to who plays it, so the rollouts are those of one process. Every
process is given all groups of an optimizer batch and computes some of them; the others it only counts, so each
divides by the counts of the whole batch, and the sum of the gradients is that of one process, rounding apart.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from peft import PeftModel

from harness.config.schema import RunConfig
from harness.core.errors import ConfigError, HarnessError, InfraError, NotFoundError, RefusedError
from harness.core.seeds import derive_seed
from harness.core.types import Completion, Rollout, Task
from harness.envs.base import Environment
from harness.inference.models import LoadedModel
from harness.rollouts.collect import Engine, Sampling, Timing, collect
from harness.rollouts.wire import from_wire, to_wire
from harness.training.batches import Group
from harness.training.policy import StepStats, update_policy
from harness.training.ranks import Ranks
from harness.training.room import Room

_KINDS = {kind.__name__: kind for kind in (ConfigError, NotFoundError, RefusedError, InfraError)}


@dataclass(frozen=True, slots=True)
class Site:
    """An environment of the run, for training or an eval, with the tasks of its split by id."""

    env: Environment
    tasks: Mapping[str, Task]

    @classmethod
    def of(cls, env: Environment, split: str) -> Site:
        """Return the site of a split."""
        return cls(env, {task.id: task for task in env.tasks(split)})


@dataclass(slots=True)
class Crew:
    """This process's part in a run of several; as an engine of process 0 it plays episodes with all of them.

    Args:
        ranks: the processes.
        config: the run's config.
        loaded: the base model, here.
        model: the same with its adapters.
        parameters: the adapters' weights, in the same order everywhere.
        engine: samples from the model here.
        sites: where tasks come from, by a name that is the same everywhere.
        room: the budget of a training pass here.
    """

    ranks: Ranks
    config: RunConfig
    loaded: LoadedModel
    model: PeftModel
    parameters: Sequence[torch.nn.Parameter]
    engine: Engine
    sites: Mapping[str, Site]
    room: Room

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        max_tokens: int,
        temperature: float,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Completion]]:
        """Sample in this process alone; see `rollouts.collect.Engine`."""
        return self.engine.generate(prompts, n, max_tokens, temperature, seeds)

    def play(
        self,
        env: Environment,
        tasks: Sequence[Task],
        n: int,
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
        components: Mapping[str, str] | None,
        timing: Timing,
    ) -> list[Rollout]:
        """Play tasks in all processes, every one its share; see `rollouts.collect.collect`.

        Raises:
            LostProcessError: a process is gone.
            HarnessError: what another process refused.
        """
        name = next(name for name, site in self.sites.items() if site.env is env)
        order = {"site": name, "tasks": [task.id for task in tasks], "n": n, "sampling": asdict(sampling)}
        order |= {"seeds": [list(own) for own in seeds], "components": components and dict(components)}
        self.ranks.tell({"do": "play"} | order)
        mine = self._play(order, timing)
        began = time.monotonic()
        answers = self.ranks.gather([])[1:]
        timing.generate_s += time.monotonic() - began
        shares = [mine]
        for answer in answers:
            if "error" in answer:
                raise _KINDS.get(answer["error"], InfraError)(answer["message"], answer["hint"])
            shares.append([from_wire(data, self.sites[name].tasks) for data in answer["rollouts"]])
            timing.tokens += sum(len(rollout.completion.token_ids) for rollout in shares[-1])
        size = self.ranks.size
        return [r for i in range(len(tasks)) for r in shares[i % size][i // size * n : (i // size + 1) * n]]

    def _play(self, order: Mapping[str, Any], timing: Timing) -> list[Rollout]:
        """Play this process's share: every `size`-th task."""
        self.ranks.share(self.parameters)
        site, share = self.sites[order["site"]], slice(self.ranks.rank, None, self.ranks.size)
        tasks = [site.tasks[name] for name in order["tasks"][share]]
        if not tasks:
            return []
        sampling, loaded = Sampling(**order["sampling"]), self.loaded
        return collect(
            self.engine, loaded.tokenizer, loaded.eos_ids, site.env, tasks, order["n"], sampling,
            order["seeds"][share], order["components"], timing,
        )  # fmt: skip

    def update(
        self, step: int, groups: Sequence[Group], optimizer: torch.optim.Optimizer, max_tokens: int
    ) -> StepStats:
        """Run the optimizer on the groups of a step, each of which one process computes; returns the sums over all.

        Args:
            step: decides the masks of dropout.
            groups: with spread.
            optimizer: of process 0.
            max_tokens: length limit of a completion.

        Raises:
            LostProcessError: a process is gone.
            DivergedError: the gradient is not finite.
        """
        if self.ranks.size > 1:
            self.ranks.tell({"do": "update", "step": step, "max_tokens": max_tokens, "groups": _spelt(groups)})
        stats = self._update(step, groups, optimizer, max_tokens)
        for answer in self.ranks.gather(None)[1:]:
            stats = stats.plus(StepStats.of(answer))
        return stats

    def _update(
        self, step: int, groups: Sequence[Group], optimizer: torch.optim.Optimizer, max_tokens: int
    ) -> StepStats:
        train, rank = self.config.train, self.ranks.rank
        address = ("dropout", step, rank) if rank else ("dropout", step)  # a resumed run draws the same masks
        torch.manual_seed(derive_seed(train.seed, *address))
        return update_policy(
            self.model.get_base_model(),
            self.parameters,
            optimizer,
            own_part(groups, rank, self.ranks.size, train.minibatches),
            train,
            self.config.optimizer.max_grad_norm,
            max_tokens,
            self.room,
            self.ranks,
        )

    def serve(self) -> None:
        """Do what process 0 tells, until it says that all is done.

        Raises:
            LostProcessError: process 0 is gone.
        """
        unused = torch.optim.SGD(self.parameters, lr=0.0)  # process 0 has the one that counts
        while (order := self.ranks.hear())["do"] != "end":
            if order["do"] == "play":
                self.ranks.gather(self._answer(order))
                continue
            groups = _read(order["groups"], self.sites)
            stats = self._update(order["step"], groups, unused, order["max_tokens"])
            self.ranks.gather(stats.to_json())

    def _answer(self, order: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"rollouts": [to_wire(rollout) for rollout in self._play(order, Timing())]}
        except HarnessError as error:
            return {"error": type(error).__name__, "message": error.message, "hint": error.hint}


def own_part(groups: Sequence[Group], rank: int, size: int, minibatches: int) -> list[Group]:
    """Return all groups of a step, with everything that another process computes marked so.

    Within each minibatch the largest group goes to the process with the fewest tokens so far (Graham 1969, longest
    processing time first: at most 4/3 of the best possible maximum).

    Args:
        groups: of a step, with spread.
        rank: of this process.
        size: processes in all.
        minibatches: updates of the step; the batches are those of `update_policy`.
    """
    if size == 1:
        return list(groups)
    owners: dict[int, int] = {}
    count = max(1, min(minibatches, len(groups)))
    for first in range(count):
        loads = [0] * size
        places = range(first, len(groups), count)
        sizes = {place: len(groups[place].prompt) + groups[place].computed_tokens for place in places}
        for place in sorted(places, key=lambda i: (-sizes[i], i)):
            owners[place] = loads.index(min(loads))
            loads[owners[place]] += sizes[place]
    return [
        group if owners[place] == rank else replace(group, elsewhere=frozenset(range(len(group.rollouts))))
        for place, group in enumerate(groups)
    ]


def _spelt(groups: Sequence[Group]) -> list[dict[str, Any]]:
    return [
        {
            "env": group.rollouts[0].task.env,
            "rollouts": [to_wire(rollout) for rollout in group.rollouts],
            "advantages": list(group.advantages),
            "temperature": group.temperature,
            "outside": sorted(group.outside),
            "elsewhere": sorted(group.elsewhere),
        }
        for group in groups
    ]


def _read(spelt: Sequence[Mapping[str, Any]], sites: Mapping[str, Site]) -> list[Group]:
    return [
        Group(
            tuple(from_wire(rollout, sites[training_site(data["env"])].tasks) for rollout in data["rollouts"]),
            tuple(data["advantages"]),
            data["temperature"],
            frozenset(data["outside"]),
            frozenset(data["elsewhere"]),
        )
        for data in spelt
    ]


def training_site(env: str) -> str:
    """Return the name of the site that trains an environment."""
    return f"train/{env}"


def eval_site(place: int) -> str:
    """Return the name of the site of an environment of CONTEXT.md, by its place there."""
    return f"eval/{place}"
