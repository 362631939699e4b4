"""Training data: what is read from files, which errors name the line, what examples hold, and how prompts are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from symbiosis.cli.chats import IGNORED, chat_prompt
from symbiosis.cli.data import (
    FORMAT_FILE,
    PromptFormat,
    alpaca,
    read_prompts,
    read_records,
    tokenize,
)
from symbiosis.errors import UsageError
from tests.cli.chat_model import TEMPLATE, chat_tokenizer

TOKENIZER = chat_tokenizer()
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


def write(folder: Path, *records: Any, name: str = "data.jsonl") -> Path:
    file = folder / name
    file.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in records), encoding="utf-8")
    return file


def texts(example: dict[str, list[int]]) -> tuple[str, str]:
    """Return an example, and the part of it that counts in the loss."""
    learned = [label for label in example["labels"] if label != IGNORED]
    assert all(label in (IGNORED, token) for token, label in zip(example["input_ids"], example["labels"], strict=True))
    return TOKENIZER.decode(example["input_ids"]), TOKENIZER.decode(learned)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "a", "completion": ', "line 2: not JSON (Expecting value at column 31)"),
        ('["a", "b"]', "line 2: ['a', 'b'] is no object"),
        ('{"prompt": "a", "answer": "b"}', "line 2: only 'prompt', 'answer'"),
        ('{"prompt": "a", "completion": 3}', "line 2: 'completion' is 3, not a string"),
        ('{"prompt": [1], "completion": "b"}', "line 2: 'prompt' is [1], not a string; give prompt and completion"),
        ('{"prompt": "a", "prompt": "b", "completion": "c"}', "line 2: a name stands twice in an object"),
        ('{"prompt": " ", "completion": "b"}', "line 2: 'prompt' is empty"),
        ('{"text": "b"}', "line 2: the fields differ from those of the first record"),
        (r'{"prompt": "a", "completion": "\ud800"}', r"line 2: \ud800 is an unpaired surrogate"),
    ],
)
def test_wrong_lines(tmp_path: Path, line: str, complaint: str) -> None:
    file = write(tmp_path, {"prompt": "a", "completion": "b"}, line, {"prompt": "c", "completion": "d"})
    with pytest.raises(UsageError) as caught:
        read_records(file)
    assert f"{file}, {complaint}" in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("hi", '"messages" is no list'),
        ([{"role": "user", "content": 3}], 'line 1, message 1: give "content" as a text, not 3'),
        ([{"role": "user", "content": "x"}, "hi"], "line 1, message 2: give \"role\" as a text, not 'hi'"),
        ([{"role": "user", "content": "hi"}], "no message of the assistant"),
        ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": " "}], "of the assistant is empty"),
        (
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "weight": 0}],
            'only messages of "weight" 0 of',
        ),
        ([{"role": "assistant", "content": "ho", "weight": 0.5}], 'message 1: "weight" is 0.5; give 1, or 0'),
    ],
)
def test_wrong_conversations(tmp_path: Path, messages: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        read_records(write(tmp_path, {"messages": messages}))


def test_a_list_in_a_json_file(tmp_path: Path) -> None:
    file, records = tmp_path / "data.json", [{"instruction": "add", "input": "1", "output": "2"}]
    file.write_text(json.dumps(records), encoding="utf-8")
    assert read_records(file) == records
    for text, complaint in (
        ('{"prompt": "a"}\n{"prompt": "b"}', "a file with an object on each line is called .jsonl"),
        ('{"prompt": "a"}', "give a list of records"),
        ('["a"]', "record 1: 'a' is no object"),
        ('[{"text": "\\udcff"}]', r"record 1: \udcff is an unpaired surrogate"),
        ("[]", "there is nothing in it"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError) as caught:
            read_records(file)
        assert complaint in str(caught.value)


def test_conversations_of_sharegpt(tmp_path: Path) -> None:
    turns = [{"from": "system", "value": "be"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    messages = [
        {"role": role, "content": one["value"]}
        for role, one in zip(("system", "user", "assistant"), turns, strict=True)
    ]
    assert read_records(write(tmp_path, {"conversations": turns, "id": 1})) == [{"id": 1, "messages": messages}]
    assert read_prompts(write(tmp_path, {"conversations": turns})) == [{"messages": messages[:2]}]
    weights = None, None, 0, None, 1  # those of a table have nulls
    weighted = [{**one, "weight": weight} for one, weight in zip([*turns, *turns[1:]], weights, strict=True)]
    (found,) = read_records(write(tmp_path, {"conversations": weighted}))
    expected = [*messages, *messages[1:]]
    assert found == {"messages": [{"weight": weight} | one for one, weight in zip(expected, weights, strict=True)]}
    for wrong in ("hi", [{"from": "human"}], ["hi"]):
        with pytest.raises(UsageError, match=r'"conversations" \(each with "from" and "value"\)'):
            read_records(write(tmp_path, {"conversations": wrong}))
    with pytest.raises(UsageError, match='message 1: give "role" as a text'):
        read_records(write(tmp_path, {"conversations": [{"from": [], "value": ""}]}))


def test_roles_that_no_model_knows_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = [{"role": "asistant", "content": "typo"}, {"role": "martian", "content": "o"}] * 2
    file = write(tmp_path, {"messages": [*CHAT, odd[0]]}, {"messages": [*CHAT, *odd[1:3]]})
    assert len(read_records(file)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "nothing is learned from 2 messages with the role 'asistant'; is it misspelled?" in said
    assert "from 1 message with the role 'martian'" in said
    read_records(write(tmp_path, {"messages": CHAT}))
    assert not capsys.readouterr().err


def test_prompts_and_completions_may_be_messages(tmp_path: Path) -> None:
    """TRL's conversational form: only what the assistant says in the completion counts in the loss."""
    record = {"prompt": CHAT[:4], "completion": CHAT[4:]}
    file = write(tmp_path, record, {"messages": CHAT})
    records = read_records(file)
    assert records == [record, {"messages": CHAT}]
    mine, whole = tokenize(records, TOKENIZER, 200, "data").examples
    assert mine["input_ids"] == whole["input_ids"]
    assert [texts(mine)[1], texts(whole)[1]] == ["no<end>", "hello<end>no<end>"]
    apart = tokenize(records, templated(LATEST_SYSTEM), 200, "data")  # one example for each answer
    assert [texts(example)[1] for example in apart.examples] == ["no<end>", "hello<end>", "no<end>"]
    assert apart.records == [1, 2, 2]
    answered = {"prompt": CHAT[:3]}  # what the assistant says in the prompt stays in it, as in training
    prompts = write(tmp_path, record, answered, name="prompts.jsonl")
    assert read_prompts(prompts) == [{"messages": CHAT[:4]}, {"messages": CHAT[:3]}]
    both = {"messages": CHAT, "prompt": "another", "completion": "one"}
    assert read_prompts(write(tmp_path, both)) == [{"messages": CHAT[:4]}]
    (learned,) = tokenize(read_records(write(tmp_path, both)), TOKENIZER, 200, "data").examples
    assert learned == whole
    for wrong, complaint in (
        ({"prompt": CHAT[:3], "completion": CHAT[3:4]}, "no message of the assistant"),
        ({"prompt": CHAT[:2], "completion": ["no"]}, "line 1, message 3: give \"role\" as a text, not 'no'"),
        ({"prompt": CHAT[:2], "completion": "no"}, "'prompt' is .*, not a string; give prompt and completion both"),
        ({"prompt": "hi", "completion": CHAT[4:]}, "'completion' is .*, not a string; give prompt and completion both"),
        ({**record, "tools": [{"name": "clock"}]}, '"tools" are not given to chat templates'),
    ):
        with pytest.raises(UsageError, match=complaint):
            read_records(write(tmp_path, wrong))


def test_tools_of_a_conversation_are_refused(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert read_records(write(tmp_path, {"messages": messages, "tools": []}))
    with pytest.raises(UsageError, match='line 1: "tools" are not given to chat templates'):
        read_records(write(tmp_path, {"messages": messages, "tools": [{"name": "clock"}]}))


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("missing.jsonl", None, "cannot be read (No such file or directory)"),
        ("data.md", b"{}", "give a file that ends in .jsonl, .json, .csv, .parquet, .txt"),
        ("latin.txt", b"one\ntwo caf\xe9\n", "line 2: not UTF-8"),
        ("latin.json", b'[{"text":\n"caf\xe9"}]', "line 2: not UTF-8"),
        ("empty.jsonl", b"\n", "there is nothing in it"),
        ("empty.txt", b"\n", "there is nothing in it"),
        ("fields.csv", b"a,b\n1,2\n", "line 2: only 'a', 'b'"),
        (
            "latin.csv",
            b"prompt,completion\n" + 2000 * b"some words,more words\n" + b"caf\xe9,b\n",
            "line 2002: not UTF-8",
        ),
        ("number.jsonl", b'{"prompt": ' + b"9" * 5_000 + b"}", "line 1: Exceeds the limit"),
        ("deep.jsonl", b'{"prompt": ' + b"[" * 100_000, "line 1: nested too deeply"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, content: bytes | None, complaint: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_records(file)
    assert str(file) in str(caught.value)
    assert complaint in str(caught.value)


def test_long_fields_of_csv(tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text(f"prompt,completion\na,{'b' * 200_000}\n", encoding="utf-8")
    assert [len(one["completion"]) for one in read_records(file)] == [200_000]


def test_prompts_are_those_of_training(tmp_path: Path) -> None:
    """The prompt of a training record is the beginning of the example that training made of it."""
    tokenizer = chat_tokenizer()
    system = {"role": "system", "content": "be brief"}
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    for record in (
        {"instruction": "add", "input": "1 2", "output": "3"},
        {"instruction": "add", "output": "3"},
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": "b", "instruction": "add"},
        {"prompt": "a", "instruction": "add", "input": "1 2", "output": "3"},
        {"messages": [system, user, answer]},
        {"prompt": [system, user], "completion": [answer]},
        {"prompt": [user, answer], "completion": [answer]},
    ):
        data = tokenize([record], tokenizer, 512, "data")
        (asked,) = read_prompts(write(tmp_path, record))
        ids = data.format.prompt(tokenizer, asked)
        example = data.examples[0]
        assert (data.format.name == "alpaca") == ("output" in record) == ("### Instruction" in tokenizer.decode(ids))
        assert ids == example["input_ids"][: len(ids)]
        assert [label != IGNORED for label in example["labels"]].index(True) == len(ids)


def test_of_a_prompt_and_an_instruction_one_is_used() -> None:
    both = {"prompt": "a", "instruction": "add", "input": "1 2"}
    assert PromptFormat("alpaca").used(both) == {"instruction": "add", "input": "1 2"}
    assert PromptFormat("pairs").used(both) == PromptFormat().used(both) == {"prompt": "a"}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "there are no prompts in it"),
        ('{"text": "a"}', "line 1: give each prompt as an object"),
        ("3", "line 1: give each prompt as an object"),
        ('{"instruction": "a", "input": 3}', "line 1: give each prompt"),
        ("{", "line 1: not JSON"),
        ('{"prompt": ["a"]}', 'line 1, message 1: give "role" as a text'),
        ('{"prompt": []}', "line 1: there is no message before the answer"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 1: there is no message before the answer"),
        ('{"messages": "a", "prompt": "b"}', 'line 1, "messages" is no list'),
        (r'{"messages": [{"role": "user", "content": "\udc00"}]}', r"line 1: \\udc00 is an unpaired surrogate"),
    ],
)
def test_wrong_prompts(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=complaint):
        read_prompts(file)


def test_line_separators_inside_strings_do_not_break_lines(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a\u2028b", "completion": "c"}\r\n{"prompt": "d", "completion": "e"}', encoding="utf-8")
    assert [one["prompt"] for one in read_records(file)] == ["a\u2028b", "d"]


def test_csv_has_the_same_fields(tmp_path: Path) -> None:
    file = write(tmp_path, 'prompt,completion,id\n"a, b",c,1\n', name="pairs.csv")
    (example,) = tokenize(read_records(file), TOKENIZER, 32, "pairs").examples
    assert texts(example) == ("<begin>a, b\nc<end>", "c<end>")
    nameless = write(tmp_path, "prompt,completion,,\na,b,,\n", name="nameless.csv")
    assert read_records(nameless) == [{"prompt": "a", "completion": "b"}]
    ended = write(tmp_path, "prompt,completion\na,b,\n", name="ended.csv")  # each line of some programs ends in a comma
    assert read_records(ended) == [{"prompt": "a", "completion": "b"}]


def test_validation_data_have_the_prompts_of_the_training_data(tmp_path: Path) -> None:
    one = read_records(write(tmp_path, '{"prompt": "a", "completion": "b"}', name="one.jsonl"))
    other = read_records(write(tmp_path, '{"prompt": "a", "completion": " b"}', name="other.jsonl"))
    form = tokenize(one, TOKENIZER, 32, "one").format
    (example,) = tokenize(other, TOKENIZER, 32, "other", form).examples
    assert texts(example) == ("<begin>a\n b<end>", " b<end>")
    text = read_records(write(tmp_path, '{"text": "a b c"}', name="text.jsonl"))
    with pytest.raises(UsageError, match="text: the fields differ from those of the training data"):
        tokenize(text, TOKENIZER, 32, "text", form)


def test_csv_that_would_lose_something(tmp_path: Path) -> None:
    quoted = write(tmp_path, 'prompt,completion\na,b\nc,"d\ne,f\n', name="quoted.csv")
    with pytest.raises(UsageError, match=r"quoted\.csv, line \d: not CSV"):
        read_records(quoted)
    twice = write(tmp_path, "prompt,prompt,completion\na,b,c\n", name="twice.csv")
    with pytest.raises(UsageError, match="a name stands twice"):
        read_records(twice)


def test_csv_with_more_fields_than_names(tmp_path: Path) -> None:
    file = write(tmp_path, "prompt,completion\nGreet,Hello, how are you?\n", name="pairs.csv")
    with pytest.raises(UsageError, match="line 2: more fields than names in line 1; quote fields"):
        read_records(file)


def test_parquet_without_pyarrow_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    file = write(tmp_path, "PAR1", name="pairs.parquet")
    with pytest.raises(UsageError, match="pip install pyarrow"):
        read_records(file)


@pytest.mark.parametrize(
    "records",
    [
        [{"prompt": "ask", "completion": "one"}, {"prompt": "a ", "completion": "b"}],
        [{"messages": CHAT}, {"messages": CHAT[1:3]}],
        [{"prompt": CHAT[:4], "completion": CHAT[4:]}],
        [{"instruction": "add", "input": "", "output": "2"}, {"instruction": "add", "input": "1", "output": "2"}],
    ],
    ids=["pairs", "messages", "TRL", "Alpaca"],
)
def test_parquet_has_the_same_records(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    """Other files whose names fit the file's as a pattern are not read."""
    write_table(pyarrow.Table.from_pylist([{"text": "no"}]), tmp_path / "a1.parquet")
    write_table(pyarrow.Table.from_pylist(records), tmp_path / "a[1].parquet")
    assert read_records(tmp_path / "a[1].parquet") == records == read_records(write(tmp_path, *records))


def test_wrong_parquet_files(tmp_path: Path) -> None:
    file = tmp_path / "data.parquet"
    with pytest.raises(UsageError, match=r"data\.parquet: cannot be read \(No such file or directory\)"):
        read_records(file)
    write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), file)
    with pytest.raises(UsageError, match="there is nothing in it"):
        read_records(file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UsageError, match=r"data\.parquet: cannot be read \(ArrowInvalid"):
        read_records(file)
    write_table(pyarrow.table({"prompt": ["a", "b"], "completion": ["c", None]}), file)
    with pytest.raises(UsageError, match=r"data\.parquet, row 2: only 'prompt'; give each record"):
        read_records(file)


def test_null_fields_are_missing_fields(tmp_path: Path) -> None:
    """The columns of a Parquet file are those of all its records."""
    pairs = {"prompt": CHAT[:4], "completion": CHAT[4:]}
    records = [{**pairs, "messages": None, "text": None}, {"messages": CHAT, "prompt": None, "completion": None}]
    write_table(pyarrow.Table.from_pylist(records), tmp_path / "data.parquet")
    for file in (tmp_path / "data.parquet", write(tmp_path, *records)):
        assert read_records(file) == [pairs, {"messages": CHAT}]
    assert read_prompts(write(tmp_path, *records)) == [{"messages": CHAT[:4]}] * 2
    added = {"instruction": "add", "output": "2"}
    assert read_records(write(tmp_path, {**added, "input": None})) == [added]
    mixed = [{"text": "a", "messages": None}, {"text": None, "messages": CHAT}]
    write_table(pyarrow.Table.from_pylist(mixed), tmp_path / "mixed.parquet")
    with pytest.raises(UsageError, match=r"mixed\.parquet, row 2: the fields differ from those of the first record"):
        read_records(tmp_path / "mixed.parquet")


def test_pairs_count_in_the_loss_after_the_prompt(tmp_path: Path) -> None:
    records = read_records(write(tmp_path, *({"prompt": p, "completion": c} for p, c in (("ask", "one"), ("a ", "b")))))
    data = tokenize(records, TOKENIZER, 32, "pairs")
    assert [*map(texts, data.examples)] == [("<begin>ask\none<end>", "one<end>"), ("<begin>a b<end>", "b<end>")]
    assert (data.cut, data.skipped, data.format) == (0, 0, PromptFormat("pairs", "\n"))


def test_completions_that_begin_with_a_space_need_no_separator(tmp_path: Path) -> None:
    data = tokenize([{"prompt": "ask", "completion": " one"}], TOKENIZER, 32, "pairs")
    assert texts(data.examples[0])[0] == "<begin>ask one<end>"
    assert data.format == PromptFormat("pairs", "")


def test_alpaca_has_its_own_prompt() -> None:
    records = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Name a colour.", "input": "", "output": "red"},
    ]
    first, second = map(texts, tokenize(records, TOKENIZER, 500, "alpaca").examples)
    assert "paired with an input" in first[0]
    assert "### Input:\n1 2\n\n### Response:\n3<end>" in first[0]
    assert second == (f"<begin>{alpaca('Name a colour.')}red<end>", "red<end>")
    assert "Input" not in second[0]


def test_only_what_the_assistant_says_counts() -> None:
    (example,) = tokenize([{"messages": CHAT}], TOKENIZER, 200, "chat").examples
    assert texts(example) == (
        "<system>Be brief.<user>hi<assistant>hello<end><user>more<assistant>no<end>",
        "hello<end>no<end>",
    )


def test_a_tokenizer_without_chat_template_is_refused() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        tokenize([{"messages": CHAT}], tokenizer, 200, "chat")


def templated(template: str) -> PreTrainedTokenizerFast:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


EACH = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% if one.role == 'assistant' %}<end>{% endif %}"
LATEST_SYSTEM = (
    "{% for one in messages %}{% if one.role == 'user' %}[{% if loop.last %}{{ messages[0].content }} {% endif %}"
    "{{ one.content }}]{% elif one.role == 'assistant' %}{{ one.content }}<end>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [chat_tokenizer().chat_template, LATEST_SYSTEM])
def test_an_answer_of_weight_0_is_not_learned(template: str) -> None:
    """The second template gives an example for each answer."""
    messages = [{**message, "weight": 0 if message["content"] == "hello" else None} for message in CHAT]
    examples = tokenize([{"messages": messages}], templated(template), 200, "chat").examples
    assert "".join(texts(example)[1] for example in examples) == "no<end>"


@pytest.mark.parametrize(
    ("template", "prompts", "answers"),
    [
        (  # a thought that is left out of answers, as DeepSeek-R1 and QwQ do
            EACH + "{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}",
            [
                "<system>Be brief.<user>hi<assistant><think>",
                "<system>Be brief.<user>hi<assistant>hello<end><user>more<assistant><think>",
            ],
            ["hello<end>", "no<end>"],
        ),
        (LATEST_SYSTEM, ["[Be brief. hi]", "[hi]hello<end>[Be brief. more]"], ["hello<end>", "no<end>"]),  # as Mistral
    ],
)
def test_templates_that_change_earlier_messages(template: str, prompts: list[str], answers: list[str]) -> None:
    """There is an example for each answer, whose prompt is that of generation."""
    tokenizer = templated(template)
    examples = tokenize([{"messages": CHAT}], tokenizer, 200, "chat").examples
    assert [texts(one)[1] for one in examples] == answers
    for one, messages, prompt in zip(examples, (CHAT[:2], CHAT[:4]), prompts, strict=True):
        ids = chat_prompt(tokenizer, messages)
        assert one["input_ids"][: len(ids)] == ids
        assert tokenizer.decode(ids) == prompt


def test_a_conversation_may_begin_with_the_assistant() -> None:
    """Many templates refuse an empty conversation."""
    tokenizer = templated("{% if not messages %}{{ raise_exception('empty') }}{% endif %}" + EACH + "{% endfor %}")
    (example,) = tokenize([{"messages": CHAT[2:4]}], tokenizer, 200, "chat").examples
    assert texts(example) == ("<assistant>hello<end><user>more", "hello<end>")


@pytest.mark.parametrize("answer", ["d", "e", ">", "hello"])
def test_the_end_of_an_answer_is_what_follows_it(answer: str) -> None:
    """Letters of a short answer are in its end too."""
    for before in ("", "<think>"):  # with a thought, the template changes earlier messages
        prompt = f"{{% if add_generation_prompt %}}<assistant>{before}{{% endif %}}"
        tokenizer = templated(EACH + "{% endfor %}" + prompt)
        data = tokenize([{"messages": [CHAT[1], {**CHAT[2], "content": answer}]}], tokenizer, 200, "chat")
        assert data.format.end == "<end>"
        assert texts(data.examples[0])[1] == f"{answer}<end>"


def test_a_template_that_changes_what_the_assistant_says() -> None:
    """As Qwen3 does with thoughts."""
    tokenizer = templated(
        "{% for one in messages %}<{{ one.role }}>{% if one.role == 'assistant' %}"
        "{% if loop.last %}<think>{{ one.content }}{% endif %}<end>{% else %}{{ one.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    examples = tokenize([{"messages": CHAT}], tokenizer, 200, "chat").examples
    assert [texts(one)[1] for one in examples] == ["<think>hello<end>", "<think>no<end>"]
    begun = tokenize([{"messages": CHAT[2:]}], tokenizer, 200, "chat")
    assert [texts(one)[1] for one in begun.examples] == ["<think>no<end>"]
    assert begun.skipped == 1, "the first message, which has no prompt"


@pytest.mark.parametrize("answer", ["hi there", "a hi", "hi", "<think>\nhm</think>yes"])
def test_answers_that_repeat_the_user_or_have_thoughts(answer: str) -> None:
    """As of DeepSeek-R1, whose prompts begin a thought, and whose template leaves thoughts out."""
    said = "{{ one.content.split('</think>')[-1] }}"
    tokenizer = templated(
        "{% for one in messages %}<{{ one.role }}>{% if one.role == 'assistant' %} " + said + "<end>"
        "{% else %}{{ one.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
    )
    (example,) = tokenize([{"messages": [CHAT[1], {**CHAT[2], "content": answer}]}], tokenizer, 200, "chat").examples
    whole, learned = texts(example)
    assert learned == answer.removeprefix("<think>\n") + "<end>"
    assert whole == "<user>hi<assistant><think>\n" + learned


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_space_that_a_tokenizer_adds_is_not_in_the_middle_of_a_text(scheme: str) -> None:
    """As SentencePiece does. Tokens of training are those of generation, and have the text's own spaces."""
    letters = sorted({*"▁:<>[]", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ.", "\n"})
    vocabulary = {token: number for number, token in enumerate(["<end>", *letters, "▁h", "▁n", "▁▁"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "h"), ("▁", "n"), ("▁", "▁")]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for one in messages %}{{ one.role }}: {{ one.content }}{% if one.role == 'assistant' %}\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (example,) = tokenize([{"messages": CHAT}], tokenizer, 200, "chat").examples
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    pieces = tokenizer.convert_ids_to_tokens(example["input_ids"])
    assert "".join(pieces).replace("▁", " ").strip() == whole.strip()
    for messages in (CHAT[:2], CHAT[:4]):
        prompt = chat_prompt(tokenizer, messages)
        assert example["input_ids"][: len(prompt)] == prompt


def test_errors_of_a_template_name_the_record() -> None:
    tokenizer = templated(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    )
    with pytest.raises(UsageError, match="chat, record 2: the model's chat template fails: TemplateError: no system"):
        tokenize([{"messages": CHAT[1:]}, {"messages": CHAT}], tokenizer, 200, "chat")


def test_what_ends_an_answer_is_kept(tmp_path: Path) -> None:
    """`generate` ends there, whatever ends texts of the model."""
    form = tokenize(
        [{"messages": CHAT}], templated(EACH.replace("<end>", " </turn> ") + "{% endfor %}"), 200, "chat"
    ).format
    assert form.end == "</turn>"
    form.save(tmp_path)
    assert PromptFormat.load(tmp_path) == form


def test_prompts_of_a_chat_template_may_end_in_a_space() -> None:
    """A space and the answer's first letters are one token, and the answer is learned as it is generated."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = {token: number for number, token in enumerate(["<end>", *alphabet, "Ġh"])}
    inner = Tokenizer(models.BPE(vocab=merged, merges=[("Ġ", "h")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for one in messages %}{{ one.role }}: {{ one.content }}"
        "{% if one.role == 'assistant' %}{{ eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (example,) = tokenize([{"messages": CHAT}], tokenizer, 200, "chat").examples
    prompt = chat_prompt(tokenizer, CHAT[:2])
    assert example["input_ids"][: len(prompt)] == prompt
    learned = [label for label in example["labels"] if label != IGNORED]
    assert tokenizer.decode(learned) == "hello<end>no<end>"
    later = chat_prompt(tokenizer, CHAT[:4])
    assert example["input_ids"][: len(later)] == later, "with an answer in its middle"


def test_validation_data_of_another_kind_names_its_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--validation 10%: give a file that ends in .jsonl"):
        read_records(Path("10%"), "--validation")


def test_what_is_too_long_is_cut_and_counted() -> None:
    records = [{"prompt": "x" * 20, "completion": "yes"}, {"prompt": "q", "completion": "z" * 20}]
    data = tokenize(records, TOKENIZER, 10, "pairs")
    assert data.cut == 2
    assert [*map(texts, data.examples)] == [("<begin>xxxx\nyes<end>", "yes<end>"), ("<begin>\n" + "z" * 8, "z" * 8)]


def test_records_without_a_loss_are_skipped_and_counted() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for one in messages %}{% if one.role != 'assistant' or one.content == 'shown' %}{{ one.content }}"
        "{% endif %}{% endfor %}"
    )
    hidden, shown = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]}
        for answer in ("hidden", "shown")
    ]
    data = tokenize([hidden, shown], tokenizer, 20, "chat")
    assert data.skipped == 1
    assert data.records == [2]
    assert [*map(texts, data.examples)] == [("hishown", "shown")]
    with pytest.raises(UsageError, match="nothing is left to train on with --sequence 20"):
        tokenize([hidden], tokenizer, 20, "chat")


@pytest.mark.parametrize(
    ("adds", "expected"),
    [(False, ["abcd", "efg<end>", "hij<end>"]), (True, ["<begin>abc", "defg", "<end><begin>hi", "j<end>"])],
)
def test_texts_are_joined_and_divided_without_loss(adds: bool, expected: list[str]) -> None:
    tokenizer = chat_tokenizer()
    if adds:
        template = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 1)])
        tokenizer.backend_tokenizer.post_processor = template
    data = tokenize([{"text": "abcdefg"}, {"text": "hij"}], tokenizer, 4, "text")
    assert [texts(one)[0] for one in data.examples] == expected
    assert data.cut == 0
    assert data.format.prompt(tokenizer, {"prompt": "ab"}) == data.examples[0]["input_ids"][: 2 + adds]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Name a colour.", "completion": "red"},
        {"prompt": "Name a colour.", "completion": " red"},
        {"instruction": "Name a colour.", "output": "red"},
        {"messages": [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "red"}]},
        {"text": "Name a colour."},
    ],
)
def test_prompts_are_made_as_in_training(tmp_path: Path, record: dict[str, Any]) -> None:
    data = tokenize([record], TOKENIZER, 500, "data")
    data.format.save(tmp_path)
    prompt = PromptFormat.load(tmp_path).prompt(TOKENIZER, {"prompt": "Name a colour."})
    (example,) = data.examples
    assert example["input_ids"][: len(prompt)] == prompt
    if "text" not in record:
        assert example["labels"][: len(prompt)] == [IGNORED] * len(prompt)
        assert example["labels"][len(prompt)] != IGNORED


def test_without_a_format_the_tokenizer_decides(tmp_path: Path) -> None:
    assert PromptFormat.load(tmp_path) == PromptFormat()
    assert PromptFormat().prompt(TOKENIZER, {"prompt": "hi"}) == TOKENIZER("hi")["input_ids"]


@pytest.mark.parametrize("content", ["{", '{"format": "poem", "separator": ""}', "[]", '{"format": "pairs"}'])
def test_damaged_formats(tmp_path: Path, content: str) -> None:
    (tmp_path / FORMAT_FILE).write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match="delete"):
        PromptFormat.load(tmp_path)


def test_chat_prompts_end_with_the_beginning_of_an_answer() -> None:
    assert TOKENIZER.decode(chat_prompt(TOKENIZER, CHAT[:2])) == "<system>Be brief.<user>hi<assistant>"


def test_a_chat_template_that_fails_is_an_error_of_the_model() -> None:
    """A template is a program of the provider's, and so is what it says."""
    tokenizer = chat_tokenizer()
    for template in ("{{ raise_exception('\x1b]0;owned') }}", "{{ ''.__class__.__mro__ }}", "{% for %}"):
        tokenizer.chat_template = template
        with pytest.raises(UsageError, match="the model's chat template fails"):
            chat_prompt(tokenizer, CHAT[:2])
