"""`harness model`: exit codes, documents and what people read."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from tests.torch_support import tiny_afmoe, tiny_llama, tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    tiny_llama(vocabulary=260).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_check_of_a_sound_model(cli, folder):
    answer = cli("model", "check", folder, "--device", "cpu", "--rank", "4", "--json")
    assert answer.code == 0, answer.err
    document = answer.document
    assert document["passed"] is True
    assert (document["type"], document["dtype"], document["lora"]["rank"]) == ("llama", "float32", 4)
    by_name = {check["name"]: check for check in document["checks"]}
    assert by_name["tree"]["numbers"]["max"] <= 1e-4
    assert "tree: pass" in answer.err


def test_check_of_a_model_that_is_not_sound(cli, folder):
    settings = folder / "tokenizer_config.json"
    told = json.loads(settings.read_text())
    settings.write_text(json.dumps(told | {"eos_token": "<s>"}))
    config = folder / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 1}))
    main = folder / "config.json"
    main.write_text(json.dumps(json.loads(main.read_text()) | {"eos_token_id": 1}))
    answer = cli("model", "check", folder, "--device", "cpu", "--rank", "4")
    assert answer.code == 1
    assert "end_of_turn" in answer.out
    assert "is NOT among" in answer.out
    assert "checks failed" in answer.out


def test_what_cannot_be_checked(cli, tmp_path, folder):
    assert cli("model", "check", "no-such-model").code == 2
    assert cli("model", "check", "owner/name").code == 2  # without a revision
    answer = cli("model", "check", folder, "--dtype", "int8")
    assert answer.code == 2
    assert "--dtype" in answer.err
    (folder / "model.safetensors").write_bytes(b"")
    assert cli("model", "check", folder).code == 71


def test_show_needs_the_config_alone(cli, tmp_path):
    tiny_afmoe().config.save_pretrained(tmp_path / "m")
    answer = cli("model", "show", tmp_path / "m", "--rank", "4", "--prompt-tokens", "30", "--json")
    assert answer.code == 0, answer.err
    document = answer.document
    assert document["parts"]["experts"] == 3 * 6 * 3 * 48 * 40
    assert document["training_bytes"] == sum(
        document[key] for key in ("weight_bytes", "adapter_bytes", "activation_bytes", "logit_bytes")
    )
    text = cli("model", "show", tmp_path / "m", "--rank", "4", "--prompt-tokens", "30").out
    assert "shared experts" in text
    assert "copies of weights with their adapter" in text


def test_show_of_something_else(cli, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert cli("model", "show", tmp_path).code == 2
    assert cli("model", "show", "no-such-model").code == 2
