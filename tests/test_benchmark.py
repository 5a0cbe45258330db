"""The step benchmark's arithmetic and its watch over the children; the halves themselves train and are not run here."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import grpo_step
import work as benchmark_work

WORK = benchmark_work.Work(Path("model"), prompts=2, group=3, prompt_tokens=7, warmup=1, steps=2)
GENEROUS = grpo_step.Limits(memory=64 * grpo_step.GIB, seconds=60)


class WordTokenizer:
    """One token per word, but `two-part` counts double, as a word that is no single token would."""

    def __init__(self, *words):
        self.words = words

    def get_vocab(self):
        return {"Ġ" + word: number for number, word in enumerate(self.words)}

    def __call__(self, text):
        return {"input_ids": [0 for word in text.split() for _ in range(2 if word == "doubled" else 1)]}


def pair(ours, theirs, ours_mib=300.0, theirs_mib=1000.0):
    def row(seconds, mib):
        return {"step_s": seconds, "generate_s": seconds / 2, "peak_mib": mib}

    return {"harness": row(ours, ours_mib), "trl": row(theirs, theirs_mib)}


def test_the_ratio_is_the_median_over_pairs_and_not_of_medians(capsys):
    summary = grpo_step.summarise([pair(1, 10), pair(2, 8), pair(9, 12)])
    assert summary["step_s"] == {"harness": 2, "trl": 10, "ratio": 0.25}
    assert grpo_step.print_summary(summary, 3, "1.16.0")
    assert "4.00 times faster per step" in capsys.readouterr().out


@pytest.mark.parametrize("slow_or_large", [pair(1, 3.9), pair(1, 10, 501, 1000)])
def test_one_missed_bar_is_a_miss(slow_or_large):
    assert not grpo_step.print_summary(grpo_step.summarise([slow_or_large]), 1, "1.16.0")


def test_prompts_have_the_exact_length_and_differ():
    texts = benchmark_work.prompt_texts(WordTokenizer("alpha", "beta", "gamma", "delta", "to"), WORK)
    assert len(set(texts)) == len(texts) == 6
    assert {len(text.split()) for text in texts} == {7}
    assert " to" not in "".join(texts)  # words of up to three letters are left out


def test_a_prompt_of_another_length_is_refused():
    with pytest.raises(ValueError, match="14 tokens, not 7"):
        benchmark_work.prompt_texts(WordTokenizer("doubled"), WORK)


def test_every_group_has_spread_and_a_zero_mean_advantage():
    rewards = [benchmark_work.reward(index, WORK) for index in range(WORK.rows)]
    assert rewards == [0.0, 0.5, 1.0] * 2


def child(tmp_path, monkeypatch, body):
    script = tmp_path / "half.py"
    script.write_text(body)
    monkeypatch.setitem(grpo_step.HALVES, "harness", script)
    return lambda limits: grpo_step.run_child("harness", sys.executable, WORK, limits)


def test_a_child_gets_its_work_and_its_last_result_line_counts(tmp_path, monkeypatch):
    body = (
        "import json, os, sys\nwork = json.loads(sys.argv[2])\nprint('noise')\n"
        "print('RESULT ' + json.dumps({'group': work['group'], 'threads': os.environ['OMP_NUM_THREADS']}))\n"
    )
    assert child(tmp_path, monkeypatch, body)(GENEROUS) == {"group": 3, "threads": "2"}


@pytest.mark.parametrize(
    ("body", "limits", "reason"),
    [
        ("raise SystemExit('no such model')", GENEROUS, r"exit code 1\n.*no such model"),
        ("print('done')", GENEROUS, "exit code 0"),
        ("import time\ntime.sleep(60)", grpo_step.Limits(GENEROUS.memory, 0.5), "longer than"),
        ("import time\nkeep = bytearray(200_000_000)\ntime.sleep(60)", grpo_step.Limits(100e6, 60), "needs more than"),
    ],
)
def test_a_child_that_fails_is_ended_and_says_why(tmp_path, monkeypatch, body, limits, reason):
    with pytest.raises(grpo_step.ChildFailed, match=reason):
        child(tmp_path, monkeypatch, body)(limits)


def test_tuning_takes_the_fastest_setting_that_fits(monkeypatch, capsys):
    seconds = {(4, False): 9.0, (8, False): 7.0, (16, False): 8.0, (8, True): 7.5}

    def run(half, python, work, limits):
        key = (work.per_device, work.continuous)
        if key not in seconds:
            raise grpo_step.ChildFailed("trl: needs more than the 16.0 GiB it may use")
        return {"step_s": seconds[key], "peak_mib": 1.0}

    monkeypatch.setattr(grpo_step, "run_child", run)
    best = grpo_step.tune("python", WORK._replace(prompts=4, group=8), GENEROUS)
    assert (best.per_device, best.continuous) == (8, False)
    assert "per_device=32 continuous=False: trl: needs more" in capsys.readouterr().out


def test_peak_memory_grows_with_what_is_held():
    before = benchmark_work.peak_mib()
    held = bytearray(300 * 1024**2)
    held[::4096] = b"x" * len(held[::4096])
    assert benchmark_work.peak_mib() >= before
    assert benchmark_work.peak_mib() >= 300
