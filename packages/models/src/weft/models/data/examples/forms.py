"""The forms of a record: conversation, prompt with completion, pair, judged completion; recognized by field names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..inputs import list_names, type_name
from .example import Task

Message = Mapping[str, Any]  # role, content, and the record's further fields
Turns = str | Sequence[Message]  # a prompt or a completion

# By task, the accepted forms: (required fields, description for errors). The first fitting form counts.
FORMS: Mapping[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "sft": (
        (("messages",), "messages"),
        (("conversations",), "conversations"),
        (("prompt", "completion"), "prompt and completion"),
        (("instruction", "output"), "instruction and output, with or without input"),
    ),
    "dpo": ((("chosen", "rejected"), "chosen and rejected, with or without prompt"),),
    "kto": ((("prompt", "completion", "label"), "prompt, completion and label"),),
}
# The roles of ShareGPT's `from`; further values are kept.
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
ASSISTANT = "assistant"
# Names of variables set by Weft for a template, which a record's chat_template_kwargs may not set.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


class BadExample(ValueError):
    """A bad record: no example can be made. `weft data prepare --skip-bad` leaves bad records out and counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialog:
    """A prompt with one completion, or a conversation; not yet tokens. Made by `read_form` for `encode_record`."""

    prompt: Turns | None  # None for a conversation, where the assistant's turns are learned
    completion: Turns  # text or messages, like the prompt; for a conversation, all messages
    tools: Sequence[Mapping[str, Any]] | None = None  # for the chat template
    variables: Mapping[str, Any] = field(default_factory=dict)  # for the chat template: chat_template_kwargs

    @property
    def is_text(self) -> bool:
        """Whether prompt and completion are text, which needs no chat template."""
        return isinstance(self.completion, str)

    @property
    def messages(self) -> Sequence[Message]:
        """All messages, of the prompt and the completion; empty for text."""
        of_both = (() if turns is None or isinstance(turns, str) else turns for turns in (self.prompt, self.completion))
        return [message for turns in of_both for message in turns]


@dataclass(frozen=True, slots=True)
class RecordContents:
    """The contents of a record, found by `read_form`."""

    dialogs: tuple[Dialog, ...]  # dpo: chosen, rejected, with equal prompts; sft and kto: one
    label: bool | None = None  # kto: whether the completion is desirable


def read_form(record: Mapping[str, Any], task: Task, *, has_template: bool) -> RecordContents:
    """The dialogs of a record, found by field names.

    has_template: whether there is a chat template. With a template, an instruction (Alpaca) becomes a message of the
        user; without, text.
    Raises BadExample for a record in no form of the task. The message names the problem; the caller adds the place.
    """
    whole, record = record, {name: value for name, value in record.items() if value is not None}  # null: as if absent
    fields = next((fields for fields, _ in FORMS[task] if all(name in record for name in fields)), None)
    if fields is None:
        raise BadExample(_no_form(record, task, [name for name, value in whole.items() if value is None]))
    tools, variables = _tools(record), _variables(record)

    def dialog(prompt: Turns | None, completion: Turns) -> Dialog:
        return Dialog(prompt=prompt, completion=completion, tools=tools, variables=variables)

    if task == "dpo":
        return RecordContents(tuple(dialog(*each) for each in _pair(record)))
    if task == "kto":
        return RecordContents((dialog(*_prompted(record)),), _label(record["label"]))
    if fields == ("prompt", "completion"):
        return RecordContents((dialog(*_prompted(record)),))
    if "instruction" in fields:
        return RecordContents((dialog(*_instruction(record, has_template)),))
    return RecordContents((dialog(None, _conversation(record[fields[0]], fields[0])),))


def _no_form(record: Mapping[str, Any], task: Task, nulls: Sequence[str]) -> str:
    """Why a record has no form of the task. record: without its fields of null, which `nulls` names."""
    accepted = "; or ".join(description for _, description in FORMS[task])
    fitting = [
        other for other, forms in FORMS.items() if any(all(name in record for name in fields) for fields, _ in forms)
    ]
    found = f"the fields {list_names(list(map(str, record)))}" if record else "no fields"
    known = {name for forms in FORMS.values() for fields, _ in forms for name in fields}
    if missing := [name for name in nulls if name in known]:
        found += f", with null in {list_names(missing)}"
    fits = f" (its fields fit --task {' or '.join(fitting)})" if fitting else ""
    return f"has {found}, and {task} reads {accepted}{fits}"


def _pair(record: Mapping[str, Any]) -> tuple[tuple[Turns, Turns], tuple[Turns, Turns]]:
    """(prompt, chosen) and (prompt, rejected). Without a field `prompt`, the prompt is their common beginning."""
    chosen, rejected = _turns(record["chosen"], "chosen"), _turns(record["rejected"], "rejected")
    _check_same_kind(chosen, rejected, "chosen", "rejected")
    if chosen == rejected:
        raise BadExample("has equal chosen and rejected, which prefer nothing")
    prompt = _turns(record["prompt"], "prompt", may_be_empty=True) if record.get("prompt") is not None else None
    if prompt is None or (isinstance(prompt, str) and not isinstance(chosen, str)):
        # Data sets of messages often repeat the first message as text in `prompt`.
        prompt, chosen, rejected = _shared_beginning(chosen, rejected)
    _check_same_kind(prompt, chosen, "prompt", "chosen")
    for name, completion in (("chosen", chosen), ("rejected", rejected)):
        _check_completion(prompt, completion, name)
    return (prompt, chosen), (prompt, rejected)


def _shared_beginning(chosen: Turns, rejected: Turns) -> tuple[Turns, Turns, Turns]:
    """(common beginning, rest of chosen, rest of rejected). Raises BadExample without a common beginning.

    In texts, a space before the first difference goes to the completions.
    """
    shortest = min(len(chosen), len(rejected))
    number = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    if number and isinstance(chosen, str) and chosen[number - 1] == " ":
        number -= 1
    if not number:
        raise BadExample("has no prompt, and chosen and rejected share no beginning; give the field prompt")
    return chosen[:number], chosen[number:], rejected[number:]


def _prompted(record: Mapping[str, Any]) -> tuple[Turns, Turns]:
    prompt = _turns(record["prompt"], "prompt", may_be_empty=True)
    completion = _turns(record["completion"], "completion")
    _check_same_kind(prompt, completion, "prompt", "completion")
    _check_completion(prompt, completion, "completion")
    return prompt, completion


def _instruction(record: Mapping[str, Any], has_template: bool) -> tuple[Turns, Turns]:
    for name in ("instruction", "output"):
        if not isinstance(record[name], str) or not record[name]:
            raise BadExample(f"has no text in its field {name!r}, but {_describe(record[name])}")
    context = record.get("input")
    if context is not None and not isinstance(context, str):
        raise BadExample(f"has no text in its field 'input', but {_describe(context)}")
    prompt, output = record["instruction"] + (f"\n\n{context}" if context else ""), record["output"]
    _check_values([prompt, output], "instruction")
    if has_template:
        return ({"role": "user", "content": prompt},), ({"role": ASSISTANT, "content": output},)
    return f"{prompt}\n\n", output


def _label(value: Any) -> bool:
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise BadExample(f"has the label {value!r:.60}; a label is true or false, or 1 or 0")


def _conversation(value: Any, name: str) -> Sequence[Message]:
    messages = _turns(value, name)
    if isinstance(messages, str):
        raise BadExample(f"has text in its field {name!r}, not a list of messages")
    roles = list(dict.fromkeys(str(each["role"]) for each in messages))
    if ASSISTANT not in roles:
        raise BadExample(f"has no message of the role {ASSISTANT!r} to learn; its roles are {list_names(roles)}")
    return messages


def _turns(value: Any, name: str, *, may_be_empty: bool = False) -> Turns:
    """Check a field of text or messages. Raises BadExample for a value that templates cannot render."""
    if isinstance(value, str):
        if not value and not may_be_empty:
            raise BadExample(f"has an empty {name}")
        _check_values(value, name)
        return value
    if not isinstance(value, list):
        raise BadExample(f"has neither text nor messages in its field {name!r}, but {_describe(value)}")
    if not value:
        raise BadExample(f"has an empty list of messages in its field {name!r}")
    _check_values(value, name)
    return tuple(_message(each, f"message {number} of {name!r}") for number, each in enumerate(value, 1))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise BadExample(f"has {_describe(value)} as {where}; a message is an object with role and content")
    # A field of null is as good as absent: many templates would write "None".
    message: dict[str, Any] = {name: each for name, each in value.items() if each is not None}
    if "from" in message and "value" in message and "role" not in message:
        further = {name: each for name, each in message.items() if name not in ("from", "value")}
        speaker = message["from"]
        role = SHAREGPT_ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
        message = {"role": role, "content": message["value"], **further}
    if not isinstance(message.get("role"), str):
        raise BadExample(f"has no role in {where}, which has the fields {list_names(list(map(str, message)))}")
    content = message.get("content")
    if content is None and not message.keys() - {"role", "content"}:  # a call of tools has no content
        raise BadExample(f"has no content in {where}")
    if not (content is None or isinstance(content, str | list)):
        raise BadExample(f"has {_describe(content)} as content of {where}; content is text, or a list of parts")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, str) and not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else type_name(part)
            raise BadExample(f"has a part of the type {kind!r:.60} in the content of {where}; parts are text alone")
    return message


def _check_same_kind(first: Turns, second: Turns, first_name: str, second_name: str) -> None:
    if isinstance(first, str) != isinstance(second, str):
        kinds = ["text" if isinstance(each, str) else "messages" for each in (first, second)]
        raise BadExample(
            f"has {kinds[0]} in {first_name} and {kinds[1]} in {second_name}; give both as text, or both as messages"
        )


def _check_completion(prompt: Turns, completion: Turns, name: str) -> None:
    if not completion:
        raise BadExample(f"has an empty {name}" + (" behind the beginning that both share" if prompt else ""))
    if isinstance(completion, str):
        return
    if completion[0]["role"] != ASSISTANT:
        raise BadExample(f"has a {name} that begins with a message of {completion[0]['role']!r}, not of {ASSISTANT!r}")
    if not any(each.get("content") or each.keys() - {"role", "content"} for each in completion):
        raise BadExample(f"has an empty {name}")


def _tools(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    tools = record.get("tools")
    if isinstance(tools, str):  # columns of Parquet often hold tools as JSON
        tools = _parsed(tools, "tools") if tools else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise BadExample(f"has {_describe(tools)} in its field 'tools'; tools are a list of objects")
    _check_values(tools, "tools")
    return tools


def _variables(record: Mapping[str, Any]) -> Mapping[str, Any]:
    variables = record.get("chat_template_kwargs")
    if isinstance(variables, str):
        variables = _parsed(variables, "chat_template_kwargs") if variables else None
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise BadExample(f"has {_describe(variables)} in its field 'chat_template_kwargs'; give an object")
    _check_values(variables, "chat_template_kwargs")
    if reserved := [name for name in RESERVED if name in variables]:
        raise BadExample(f"sets {reserved[0]!r} in chat_template_kwargs, which the record's other fields set")
    return variables


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadExample(f"has text in its field {name!r} that is not JSON ({type(error).__name__})") from None


def _check_values(value: Any, name: str) -> None:
    """Raises BadExample for values unknown to JSON or UTF-8: NaN, half a surrogate pair, dates of Parquet."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # JSON may escape half of a surrogate pair, which is no character
        raise BadExample(f"has half a surrogate pair in its field {name!r}") from None
    except RecursionError:
        raise BadExample(f"nests too deeply in its field {name!r}") from None
    except (ValueError, TypeError) as error:
        raise BadExample(f"has a value in its field {name!r} that is not JSON: {error}") from None


def _describe(value: Any) -> str:
    """A value for an error message: the type, and the first 60 characters of a text or number."""
    if value is None or isinstance(value, dict | list):
        return type_name(value)
    return f"{type_name(value)} {value!r:.60}"
