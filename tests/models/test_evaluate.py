"""`weft evaluate`: losses, accuracies and rewards are those of transformers' logits, and bad input is one line."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn import functional as F
from weft.models.cli.evaluate import run

from tests.models.chat_folder import LENGTH, save_chat_folder

WORDS = ["warp", "weft", "loom", "row", "over", "under", "drawn", "through"]
BETA = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("evaluate") / "llama"
    save_chat_folder(made)
    return made


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reference") / "llama"
    save_chat_folder(made, seed=4)
    return made


def some_words(number: int, count: int) -> str:
    return " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(count))


def user(number: int) -> dict[str, str]:
    return {"role": "user", "content": some_words(number, 2 + number % 5)}


def assistant(number: int) -> dict[str, str]:
    return {"role": "assistant", "content": some_words(number + 3, 1 + number % 9)}


CHATS = [{"messages": [user(i), assistant(i)]} for i in range(45)]
# 43 rows: no batch size divides 43.
PAIRS = [{"prompt": [user(i)], "chosen": [assistant(i)], "rejected": [assistant(i + 1)]} for i in range(43)]
JUDGED = [{"prompt": [user(i)], "completion": [assistant(i)], "label": i % 3 == 0} for i in range(26)]


def write(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


class Their:
    """Log-probabilities of answers by transformers, one answer at a time."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).double().eval()

    def answer(self, prompt: list[dict], completion: list[dict], *, is_ended: bool = True) -> tuple[float, int]:
        """The sum of the answer's log-probabilities, and the number of its tokens.

        is_ended: whether the end token follows the answer, as in trl's preferences.
        """
        before = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        whole = self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        assert whole.startswith(before)
        given = self.tokenizer(before).input_ids
        learned = self.tokenizer(whole[len(before) :]).input_ids + [self.tokenizer.eos_token_id] * is_ended
        with torch.no_grad():
            logits = self.model(torch.tensor([given + learned])).logits[0, len(given) - 1 : -1]
        return -float(F.cross_entropy(logits, torch.tensor(learned), reduction="sum")), len(learned)


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert run([*map(str, arguments), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.mark.few(1)
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_the_loss_of_conversations(capsys, folder: Path, tmp_path: Path, batch_size: int) -> None:
    file = write(tmp_path / "chats.jsonl", CHATS)
    found = evaluated(capsys, folder, "--data", file, "--sequence-length", 96, "--batch-size", batch_size)
    theirs = Their(folder)
    answers = [theirs.answer(each["messages"][:1], each["messages"][1:], is_ended=False) for each in CHATS]
    learned = sum(count for _, count in answers)
    loss = -sum(total for total, _ in answers) / learned
    assert (found["task"], found["examples"], found["learned_tokens"]) == ("sft", len(CHATS), learned)
    assert found["loss"] == pytest.approx(loss, abs=1e-5)
    assert found["perplexity"] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)


def of_pairs(folder: Path) -> torch.Tensor:
    theirs = Their(folder)
    return torch.tensor(
        [[theirs.answer(each["prompt"], each[name])[0] for name in ("chosen", "rejected")] for each in PAIRS]
    )


@pytest.mark.exhaustive
def test_the_accuracy_of_pairs(capsys, folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.jsonl", PAIRS)
    found = evaluated(capsys, folder, "--data", file)
    policy = of_pairs(folder)
    assert (found["task"], found["examples"]) == ("dpo", len(PAIRS))
    assert found["accuracy"] == pytest.approx((policy[:, 0] > policy[:, 1]).float().mean().item())
    assert found["loss"] == pytest.approx(-policy.sum().item() / found["learned_tokens"], abs=1e-4)
    assert "reward_margin" not in found and "dpo_loss" not in found


@pytest.mark.exhaustive
def test_the_rewards_of_pairs(capsys, folder: Path, reference: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.jsonl", PAIRS)
    found = evaluated(capsys, folder, "--data", file, "--reference", reference, "--dpo.beta", BETA)
    rewards = BETA * (of_pairs(folder) - of_pairs(reference))
    margins = rewards[:, 0] - rewards[:, 1]
    assert found["dpo_loss"] == pytest.approx(-F.logsigmoid(margins).mean().item(), abs=1e-4)
    assert found["reward_accuracy"] == pytest.approx((margins > 0).float().mean().item())
    assert found["reward_margin"] == pytest.approx(margins.mean().item(), abs=1e-4)
    assert found["chosen_reward"] == pytest.approx(rewards[:, 0].mean().item(), abs=1e-4)
    assert found["rejected_reward"] == pytest.approx(rewards[:, 1].mean().item(), abs=1e-4)


LOSSES = {
    "smoothed": ("--dpo.label-smoothing 0.2", lambda m: -0.8 * F.logsigmoid(m) - 0.2 * F.logsigmoid(-m), False),
    "ipo": ("--dpo.loss ipo", lambda m: (m / BETA - 1 / (2 * BETA)) ** 2, True),
    "length-normalized": ("--dpo.length-normalized", lambda m: -F.logsigmoid(m), True),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LOSSES)
def test_the_losses_of_pairs(capsys, folder: Path, reference: Path, tmp_path: Path, name: str) -> None:
    """With each option of training. Under means over an answer's tokens, the rewards are means, too."""
    option, loss_of, is_mean = LOSSES[name]
    file = write(tmp_path / "pairs.jsonl", PAIRS)
    options = ["--reference", reference, "--dpo.beta", BETA, *option.split()]
    found = evaluated(capsys, folder, "--data", file, *options)
    rewards = BETA * (of_pairs(folder) - of_pairs(reference))
    if is_mean:
        theirs = Their(folder)
        rewards /= torch.tensor(
            [[theirs.answer(each["prompt"], each[k])[1] for k in ("chosen", "rejected")] for each in PAIRS]
        )
    margins = rewards[:, 0] - rewards[:, 1]
    assert found["dpo_loss"] == pytest.approx(loss_of(margins).mean().item(), abs=1e-4)
    assert found["reward_accuracy"] == pytest.approx((margins > 0).float().mean().item())
    assert found["reward_margin"] == pytest.approx(margins.mean().item(), abs=1e-4)
    assert found["chosen_reward"] == pytest.approx(rewards[:, 0].mean().item(), abs=1e-4)


def test_a_model_that_is_its_own_reference_has_no_rewards(capsys, folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.jsonl", PAIRS)
    found = evaluated(capsys, folder, "--data", file, "--reference", folder)
    assert found["dpo_loss"] == pytest.approx(torch.tensor(2.0).log().item())
    assert (found["reward_margin"], found["reward_accuracy"]) == (0, 0)


@pytest.mark.exhaustive
def test_the_rewards_of_judged_answers(capsys, folder: Path, reference: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "judged.jsonl", JUDGED)
    found = evaluated(capsys, folder, "--data", file, "--reference", reference, "--kto.beta", BETA)
    own, other = Their(folder), Their(reference)

    def ratios(completions: list[list[dict]]) -> torch.Tensor:
        pairs = [(each["prompt"], completion) for each, completion in zip(JUDGED, completions, strict=True)]
        return torch.tensor([own.answer(*pair)[0] - other.answer(*pair)[0] for pair in pairs])

    completions = [each["completion"] for each in JUDGED]
    ratio, kl = ratios(completions), ratios([completions[-1], *completions[:-1]]).mean().clamp(min=0)
    desirable = torch.tensor([each["label"] for each in JUDGED])
    losses = torch.where(desirable, 1 - (BETA * (ratio - kl)).sigmoid(), 1 - (BETA * (kl - ratio)).sigmoid())
    assert (found["task"], found["desirable"], found["undesirable"]) == ("kto", 9, 17)
    assert found["kl"] == pytest.approx(kl.item(), abs=1e-3)
    assert found["kto_loss"] == pytest.approx(losses.mean().item(), abs=1e-4)
    assert found["desirable_reward"] == pytest.approx(BETA * ratio[desirable].mean().item(), abs=1e-4)
    assert found["undesirable_reward"] == pytest.approx(BETA * ratio[~desirable].mean().item(), abs=1e-4)
    without = evaluated(capsys, folder, "--data", file)
    assert without["loss"] == found["loss"] and "kto_loss" not in without


def test_the_printed_lines(capsys, folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "chats.jsonl", CHATS)
    assert run([str(folder), "--data", str(file)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{folder} on {file}: sft, since the records have messages"
    assert [line.split("  ")[0].strip() for line in lines] == ["examples", "learned tokens", "loss", "perplexity"]


def test_examples_that_are_cut_are_counted(capsys, folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "chats.jsonl", CHATS)
    arguments = ["--data", str(file), "--sequence-length", "30"]
    found = evaluated(capsys, folder, *arguments)
    assert 0 < found["cut"] < len(CHATS)
    assert run([str(folder), *arguments]) == 0
    line = f"{found['cut']} of the examples cut to 30 tokens: give a longer --sequence-length"
    assert capsys.readouterr().out.splitlines()[1] == line
    assert "cut" not in evaluated(capsys, folder, "--data", file)


PROMPTED = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("records", "options", "error"),
    [
        pytest.param(None, [], "--data {file} does not exist", id="no-data"),
        pytest.param([], [], "no record is in --data {file}; give a file or folder of examples", id="empty"),
        pytest.param([{"question": "a"}], [], "{file} has records with the fields question, and", id="no-form"),
        pytest.param([PROMPTED], ["--task", "dpo"], "chosen and rejected", id="other-task"),
        pytest.param(
            [PROMPTED], ["--reference", "x"], "--reference is given, and the task sft has no reference", id="reference"
        ),
        pytest.param([PROMPTED], ["--sequence-length", "0"], "--sequence-length is 0; it must be 1 or", id="no-length"),
        pytest.param(
            [PROMPTED], ["--sequence-length", "4096"], f"is 4096, and the model's context is {LENGTH}", id="length"
        ),
        pytest.param([PROMPTED], ["--batch-size", "0"], "--batch-size is 0; it must be 1 or", id="rows"),
        pytest.param([PROMPTED], ["--dpo.beta", "0.2"], "dpo.beta is 0.2, but task is sft; give --task dpo", id="beta"),
        pytest.param(JUDGED[:2], ["--dpo.loss", "ipo"], "dpo.loss is ipo, but task is kto; give --task dpo", id="loss"),
        pytest.param(
            PAIRS[:1], ["--dpo.loss", "ipo"], "dpo.loss is ipo, and a loss of dpo needs a reference; give", id="alone"
        ),
        pytest.param([PROMPTED], ["--template", "none.jinja"], "--template none.jinja", id="template"),
        pytest.param([CHATS[0]], ["--sequence-length", "2"], "a longer --sequence-length", id="cut-away"),
        pytest.param([{"text": "warp " * 99}], [], "as bytes, but", id="text-without-a-tokenizer-of-bytes"),
        pytest.param([{**PROMPTED, "completion": ""}], [], ": line 1 ", id="an-empty-completion"),
    ],
)
def test_bad_input_is_one_line(capsys, folder: Path, tmp_path: Path, records, options: list[str], error: str) -> None:
    file = tmp_path / "records.jsonl"
    if records is not None:
        write(file, records)
    with pytest.raises(SystemExit) as ended:
        run([str(folder), "--data", str(file), *options])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("weft evaluate: ") and err.count("\n") == 1
    assert error.format(file=file) in err
    assert "data." not in err.replace(str(file), "")


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--dpo.beta 0", "dpo.beta is 0.0; it must be above 0"),
        ("--dpo.loss ipo --dpo.label-smoothing 0.1", "--dpo.label-smoothing is 0.1, but dpo.loss ipo has none"),
        ("--kto.desirable-weight -1", "--kto.desirable-weight is -1.0; it must be 0 or more"),
    ],
)
def test_options_that_training_refuses(capsys, folder: Path, tmp_path: Path, option: str, error: str) -> None:
    file = write(tmp_path / "pairs.jsonl", PAIRS)
    with pytest.raises(SystemExit) as ended:
        run([str(folder), "--data", str(file), "--reference", str(folder), *option.split()])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert error in " ".join(err.replace("│", " ").split())


def test_a_folder_without_a_model(capsys, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run([str(tmp_path), "--data", str(tmp_path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"weft evaluate: {tmp_path} has no checkpoint")


def test_weights_that_are_not_finite(capsys, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    save_chat_folder(broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    assert run([str(broken), "--data", str(write(tmp_path / "chats.jsonl", CHATS[:3]))]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "the mean loss of" in err and "nan" in err
