"""Hashes of a config: what identifies it, and what decides the weights it learns."""

from harness.config.load import config_sha, learning_sha, set_key
from harness.config.schema import RunConfig

CONFIG = RunConfig(hypothesis="h")


def test_budgets_and_checkpoints_do_not_decide_what_is_learned() -> None:
    for change in (
        "budget.tokens=9",
        "budget.wall_clock_s=60.0",
        "budget.price_per_hour=2.5",
        "checkpoint.interval=1",
        "checkpoint.keep=9",
        "watchdog.collapse=mark",
        "watchdog.kl_limit=1.0",
        "train.preflight_groups=0",
    ):
        changed = set_key(CONFIG, change)
        assert config_sha(changed) != config_sha(CONFIG)
        assert learning_sha(changed) == learning_sha(CONFIG)


def test_everything_else_does() -> None:
    for change in (
        "lora.alpha=64.0",
        "train.seed=1",
        "train.steps=30",
        "backend.threads=1",
        "train.microbatch_tokens=99",
    ):
        assert learning_sha(set_key(CONFIG, change)) != learning_sha(CONFIG)


def test_keys_that_came_later_leave_the_hashes_of_older_checkpoints_as_they_are() -> None:
    """The hash that checkpoints of a default config hold; when a new key moves it, the key belongs in ADDED_LATER."""
    assert learning_sha(CONFIG) == "6a5178fd9aef337d75ae31ec5c868c7df83db600bec68aa5a49a51e4a313130f"
    assert learning_sha(set_key(CONFIG, "warmup.learning_rate=0.1")) == learning_sha(CONFIG)
    warm = set_key(CONFIG, "warmup.steps=5")
    assert learning_sha(warm) != learning_sha(CONFIG)
    assert learning_sha(set_key(warm, "warmup.learning_rate=0.1")) != learning_sha(warm)
