import gzip
import json
from itertools import accumulate
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from conftest import tiny_tokenizer
from datasets import Dataset, DatasetDict

from data import python_sources, readers, rows
from data.mixture import Mixture, Source, SourceError, mixture_of
from data.prompts import Cut, conversations
from data.readers import ENOUGH_RECORDED, SPLITS, fingerprint, hub_dataset
from data.sources import documents, split_of, streams, token_documents
from data.tally import Tally
from speculator.errors import UserError
from speculator.files import parse_rows

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
CALL = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [{"name": "search"}]}]
ROWS = [
    {"text": "a text", "number": 1},
    {"prompt": "a", "completion": "b"},
    {"messages": CHAT},
    {"messages": [CALL[0], {"content": None, **CALL[1]}]},
    {"messages": CHAT, "tools": [{"name": "search"}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
    {"input_ids": [1, 2, 3]},
    {"input_ids": [1, 2, 4], "loss_mask": [0, 1, 1]},
]
CONTENTS = [
    {"text": "a text"},
    {"prompt": "a", "completion": "b"},
    {"messages": CHAT},
    {"messages": [CALL[0], {"role": "assistant", "tool_calls": [{"name": "search", "arguments": {}}]}]},
    {"messages": CHAT, "tools": [{"name": "search"}]},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]},
    {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]},
    {"input_ids": [1, 2, 4], "loss_mask": [0, 1, 1]},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def contents(*sources):
    return [
        {key: value for key, value in row.items() if key not in ("id", "where", "split", "name")}
        for source in sources
        for row in documents(source, None)
    ]


def ids(source, split):
    return {row["id"] for row in documents(str(source), split)}


def test_python_sources_split_by_path_and_leave_tests_out(monkeypatch):
    monkeypatch.setattr(python_sources, "MAX_PACKAGE_BYTES", 200_000)
    splits = {split: {row["id"] for row in documents("python-sources", split)} for split in SPLITS}
    assert "json/decoder.py" in splits[split_of("json/decoder.py")]
    assert not splits["train"] & splits["held-out"]
    assert not any("/tests/" in name or name.startswith("test/") for name in splits["train"])
    sizes = {split: len(names) for split, names in splits.items()}
    assert sizes["train"] > 10 * sizes["held-out"] > 100


def test_a_copy_is_dropped_before_the_split(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": "the same"}) + "\n" for _ in range(200)))
    assert sum(len(ids(file, split)) for split in SPLITS) == 1


def test_a_copy_in_another_source_is_dropped_too(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(100)))
    sources = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    found = [stream for split in SPLITS for stream in streams(mixture_of(sources), split, None)]
    texts = [row["text"] for stream in found for row in stream]
    assert sorted(texts) == sorted(f"row {i}" for i in range(100))


def test_a_long_text_file_has_a_share_in_every_split(tmp_path):
    text = "".join(f"line {i} of a book\n" for i in range(100_000))
    (tmp_path / "book.txt").write_text(text)
    splits = {split: list(documents(str(tmp_path / "book.txt"), split)) for split in SPLITS}
    assert all(splits.values())
    pieces = sorted((row for rows in splits.values() for row in rows), key=lambda row: int(row["id"].split(":")[1]))
    assert "".join(row["text"] for row in pieces) == text


@pytest.mark.parametrize("packed", [False, True])
def test_jsonl_and_txt_are_read_gzipped_or_not(tmp_path, packed):
    def write(name, text):
        path = tmp_path / (name + ".gz" if packed else name)
        (gzip.open if packed else open)(path, "wt").write(text)
        return path

    rows = write("rows.jsonl", "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(50)))
    texts = {row["text"] for split in SPLITS for row in documents(str(rows), split)}
    assert texts == {f"row {i}" for i in range(50)}
    page = write("page.txt", "a page")
    assert [row["text"] for split in SPLITS for row in documents(str(page), split)] == ["a page"]


def test_the_shape_of_a_row_is_seen_by_its_keys_in_every_kind_of_file(tmp_path):
    lines, listed, indented = (tmp_path / name for name in ("rows.jsonl", "lines.json", "list.json"))
    table, folder = tmp_path / "rows.parquet", tmp_path / "saved"
    write(lines, ROWS)
    write(listed, ROWS)
    indented.write_text("\n " + json.dumps(ROWS, indent=1))
    # A table gives every row every key, most of them null.
    every = {key: None for row in ROWS for key in row}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([every | row for row in ROWS]), table)
    Dataset.from_parquet(str(table), cache_dir=str(tmp_path / "cache")).save_to_disk(folder)
    for path in (lines, listed, indented, table, folder):
        assert contents(str(path)) == CONTENTS, path


def test_the_format_that_the_contributors_page_adds_is_read(monkeypatch):
    page = Path(__file__).parents[2] / "docs/contributing/add-a-format.md"
    code = page.read_text().partition("```python\n")[2].partition("```")[0]
    function, _, entry = code.partition("# in FORMATS\n")
    names = dict(vars(rows))
    exec(function, names)
    monkeypatch.setattr(rows, "FORMATS", [*rows.FORMATS, eval(entry, names)])
    chat = rows.content({"question": "Why?", "answer": "Because.", "other": 1}, "file:1")["messages"]
    assert [message["content"] for message in chat] == ["Why?", "Because."]
    with pytest.raises(rows.RowError, match='"answer" is not a text'):
        rows.content({"question": "Why?", "answer": 3}, "file:2")


def test_a_folder_gives_all_its_files(tmp_path):
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep" / "rows.jsonl", ROWS[:2])
    (tmp_path / "list.json").write_text(json.dumps([{"text": "listed"}]))
    (tmp_path / "page.txt").write_text("a page")
    (tmp_path / "picture.png").write_bytes(b"not text")
    assert contents(str(tmp_path)) == [*CONTENTS[:2], {"text": "listed"}, {"text": "a page"}]


def test_only_exact_copies_of_a_chat_are_dropped(tmp_path):
    other = [CHAT[0], {"role": "assistant", "content": "Hello!"}]
    rows = [{"messages": CHAT}, {"messages": other}, {"messages": CHAT}, {"messages": CHAT, "tools": [{"name": "x"}]}]
    assert len(contents(write(tmp_path / "rows.jsonl", rows))) == 3


def test_the_hub_is_read_through_the_library_with_config_and_split(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    home = tmp_path / "org" / "name"
    home.mkdir(parents=True)
    write(home / "main.jsonl", [{"text": f"main {i}"} for i in range(40)])
    write(home / "other.jsonl", [{"text": "other"}])
    entries = "".join(f"- config_name: {n}\n  data_files: [{{split: {s}, path: {n}.jsonl}}]\n" for n, s in
                      (("main", "train"), ("other", "train_sft")))  # fmt: skip
    (home / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    assert hub_dataset(str(home), "main", "train")["text"][:2] == ["main 0", "main 1"]

    # The library takes a local folder for a hub id, so only the name differs from a download.
    monkeypatch.setattr("data.readers.hub_dataset", lambda name, *rest: hub_dataset(str(tmp_path / name), *rest))
    assert contents("org/name/other:train_sft") == [{"text": "other"}]
    rows = list(documents("org/name/main", None))
    assert [row["text"] for row in rows] == [f"main {i}" for i in range(40)]
    assert rows[4]["where"] == "org/name/main:5"
    assert {split_of(row["id"]) for row in rows} == set(SPLITS)
    assert fingerprint("org/name/main") == fingerprint("org/name/main:train") != fingerprint("org/name/other:train_sft")
    with pytest.raises(SourceError, match=r"org/name: .*test"):
        contents("org/name/main:test")


def test_a_source_that_does_not_exist_fails_in_one_line(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match="nobody/nothing") as error:
        contents("nobody/nothing")
    assert "\n" not in str(error.value)


def test_a_saved_dataset_with_our_splits_keeps_them(tmp_path):
    splits = {name: Dataset.from_list([{"text": f"{name} {i}"} for i in range(30)]) for name in SPLITS}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    for name in SPLITS:
        assert [row["text"] for row in documents(str(tmp_path / "saved"), name)] == [f"{name} {i}" for i in range(30)]
    DatasetDict({"test": splits["train"]}).save_to_disk(tmp_path / "other")
    with pytest.raises(SourceError, match=r"other holds the splits test: .*other/test"):
        contents(str(tmp_path / "other"))
    assert len(contents(str(tmp_path / "other" / "test"))) == 30


def test_a_generated_folder_is_read_from_its_rows(tmp_path):
    Dataset.from_list([{"text": "a text"}]).save_to_disk(tmp_path / "rows")
    (tmp_path / "manifest.json").write_text("{}")
    before = fingerprint(str(tmp_path))
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "000000.json").write_text("{}")
    assert fingerprint(str(tmp_path)) == before
    assert len(contents(str(tmp_path))) == 1


def mixed(tmp_path):
    """Two sources of unequal documents that share some."""
    both = [f"shared {i} " * 5 for i in range(300)]
    long = write(
        tmp_path / "long.jsonl", [{"text": f"long {i} " * 30} for i in range(600)] + [{"text": t} for t in both]
    )
    short = write(tmp_path / "short.jsonl", [{"text": t} for t in both] + [{"text": f"short {i}"} for i in range(9000)])
    return long, short


def test_weights_are_shares_of_tokens_at_every_point(tmp_path):
    long, short = mixed(tmp_path)
    rows = list(token_documents(mixture_of([f"{long}@3", f"{short}@1"]), "train", tiny_tokenizer()))
    sizes = [len(row["input_ids"]) for row in rows]
    of_long = accumulate(size * row["id"].startswith("long") for size, row in zip(sizes, rows, strict=True))
    assert len(rows) > 800
    for got, total in zip(of_long, accumulate(sizes), strict=True):
        assert abs(got - 0.75 * total) <= max(sizes)
    again = token_documents(mixture_of([f"{long}@3", f"{short}@1"]), "train", tiny_tokenizer())
    assert [row["id"] for row in again] == [row["id"] for row in rows]


def test_copies_are_in_one_split_with_any_weights(tmp_path):
    long, short = mixed(tmp_path)
    for weights in ((1, 1), (1, 30), (30, 1)):
        seen = [set(), set()]
        spelled = [f"{path}@{weight}" for path, weight in zip((long, short), weights, strict=True)]
        for split in ("train", "held-out"):
            rows = token_documents(mixture_of(spelled), split, tiny_tokenizer())
            seen[split == "train"] |= {tuple(row["input_ids"]) for row in rows}
        assert min(map(len, seen)) > 5
        assert not seen[0] & seen[1]


def test_sources_without_weights_take_turns_until_all_have_ended(tmp_path):
    long, short = mixed(tmp_path)
    names = [row["id"].split(".")[0] for row in token_documents(mixture_of([long, short]), None, tiny_tokenizer())]
    assert names == ["long", "short"] * 900 + ["short"] * 8100


def test_prompts_of_sources_without_weights_are_of_all_of_them(tmp_path):
    """The first source alone would fill them: a stage 2, or an evaluation, of one source in two."""
    given = [
        write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {i}", "completion": "b"} for i in range(300)])
        for name in ("first", "second")
    ]
    tokenizer = tiny_tokenizer()
    found, _ = conversations(mixture_of(given), "train", tokenizer, Cut(8), 10)
    assert [tokenizer.decode(prompt.ids).split()[0] for prompt in found] == ["first", "second"] * 5


@pytest.mark.parametrize(
    ("sources", "message"),
    [(["a@0.5", "b"], "b"), (["a@0"], "a@0"), (["g.jsonl@-1", "h.jsonl@1"], "g.jsonl"), ([], "no source")],
)
def test_a_wrong_weight_is_an_error_that_names_its_source(sources, message):
    with pytest.raises(UserError, match=rf"^{message}"):
        mixture_of(sources)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"text": "a"}\n{"txt": "b"}\n', "rows.jsonl:2"),
        ("rows.jsonl", '{"text": "\\ud800"}\n', "rows.jsonl:1: .*surrogate"),
        ("rows.jsonl", '{"prompt": "a"}\n', "rows.jsonl:1: not a row"),
        ("rows.jsonl", '{"prompt": "a", "completion": ["b"]}\n', 'rows.jsonl:1: "completion" is no text and no'),
        ("rows.jsonl", '{"messages": []}\n', "rows.jsonl:1: a chat without messages"),
        ("rows.jsonl", '{"messages": [{"content": "a"}]}\n', 'rows.jsonl:1: the "role" of message 1'),
        (
            "rows.jsonl",
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n',
            "rows.jsonl:1: message 1 has a part of type 'image'",
        ),
        ("rows.jsonl", '{"conversations": [{"from": "me", "value": "a"}]}\n', "rows.jsonl:1: .from. is 'me'"),
        ("rows.jsonl", '{"input_ids": [1, 2], "loss_mask": [1]}\n', "rows.jsonl:1: 1 values"),
        ("rows.jsonl", '{"input_ids": [1], "loss_mask": [2]}\n', "rows.jsonl:1: .loss_mask."),
        ("rows.jsonl", '{"input_ids": [-1]}\n', "rows.jsonl:1: .input_ids. is not"),
        ("rows.json", '[{"text": "a"},\n{"text" "b"}]\n', "rows.json: not JSON"),
        ("rows.json", '[{"text": "a"}, {"txt": "b"}]\n', "rows.json:2: not a row"),
        ("model.bin", "x", "model.bin"),
        ("rows.jsonl.gz", "not gzip", "rows.jsonl.gz"),
    ],
)
def test_an_unreadable_row_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    for source in (tmp_path / name, tmp_path):
        if source.is_file() or name != "model.bin":
            with pytest.raises(UserError, match=message) as error:
                list(documents(str(source), "train"))
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("named", ["a@0.7", "a@0.0000001", "a"])
def test_a_source_is_shown_as_a_user_may_name_it(named):
    (source,) = mixture_of([named]).sources
    assert str(source) == named


def test_an_existing_file_may_be_named_like_a_weight(tmp_path):
    for name in ("texts", "texts@2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "page.txt").write_text(name)
    here = str(tmp_path / "texts")
    assert mixture_of([f"{here}@2"]) == Mixture((Source(f"{here}@2"),))
    assert mixture_of([f"{here}@2@3", f"{here}@1"]) == Mixture((Source(f"{here}@2", 3.0), Source(here, 1.0)))
    assert contents(f"{here}@2") == [{"text": "texts@2"}]
    assert contents(here) == [{"text": "texts"}]


def test_shards_that_a_server_adds_while_its_folder_is_read_wait_for_the_next_reading(tmp_path, monkeypatch):
    def shard(number: int) -> None:
        line = json.dumps({"input_ids": [number, 1], "loss_mask": [0, 1]})
        (tmp_path / "rows" / f"{number:08d}.jsonl.gz").write_bytes(gzip.compress(line.encode()))

    def read_slowly(file):
        yield from parse_rows(file)
        shard(2)

    (tmp_path / "rows").mkdir()
    (tmp_path / "manifest.json").write_text('{"recorded": true}')
    (tmp_path / "rows" / "00000002.jsonl.gz.77.partial").write_bytes(b"half of a shard")
    shard(0)
    shard(1)
    monkeypatch.setattr(readers, "parse_rows", read_slowly)
    found = [row["input_ids"][0] for row in readers.read(str(tmp_path))]
    assert found == [0, 1]
    assert len(list(readers.read(str(tmp_path)))) == 3


def test_recorded_copies_and_bad_rows_fill_no_split(tmp_path):
    rows = [{"input_ids": [n % 30, 1], "loss_mask": [0, 1]} for n in range(60)]
    (tmp_path / "rows").mkdir()
    (tmp_path / "manifest.json").write_text('{"recorded": true}')
    written = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows" / "00000000.jsonl").write_text(written + '{"input_ids": "bad"}\n')
    source = str(tmp_path)
    found = {
        split: [row["input_ids"][0] for row in documents(source, split, tally=Tally(max_share=1.0))] for split in SPLITS
    }
    assert found == {"train": list(range(28)), "validation": [28], "held-out": [29]}, "none is empty"


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(
    ("count", "held"), [(19, 0), (20, 1), (199, 9), (ENOUGH_RECORDED, 64), (2000, 100), (12000, 500)]
)
def test_so_many_recorded_answers_are_held_out_and_validated_on(tmp_path, count, held, alike):
    """Also of texts that all begin alike, as with "Hi": they are no single chat."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "manifest.json").write_text('{"recorded": true}')
    rows = (
        {
            "messages": [
                {"role": role, "content": f"{n * (own or not alike)}"} for own, role in enumerate(("user", "assistant"))
            ]
        }
        for n in range(count)
    )
    (tmp_path / "rows" / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = [row["split"] for row in readers.read(str(tmp_path))]
    assert splits == ["train"] * (count - 2 * held) + ["validation"] * held + ["held-out"] * held


@pytest.mark.parametrize("kind", ["tokens", "messages"])
def test_the_turns_of_a_recorded_chat_are_in_one_split(tmp_path, kind):
    """Chats of three turns overlap in time: turn t of chat c is request 4 c + 3 t, so that none ends with a split."""

    def row(chat: int, turn: int) -> dict:
        if kind == "tokens":
            prompt = [*range(8), chat + 9, *range(3 * turn)]
            return {"input_ids": [*prompt, 1, 2], "loss_mask": [0] * len(prompt) + [1, 1]}
        turns = [{"role": role, "content": f"{chat} {t}"} for t in range(turn + 1) for role in ("user", "assistant")]
        return {"messages": turns}

    turns = sorted((4 * chat + 30 * turn, chat, turn) for chat in range(80) for turn in range(3))
    (tmp_path / "rows").mkdir()
    (tmp_path / "manifest.json").write_text('{"recorded": true}')
    written = [json.dumps(row(chat, turn)) + "\n" for _, chat, turn in turns]
    (tmp_path / "rows" / "0.jsonl").write_text("".join(written))
    splits: dict[int, set[str]] = {}
    found = [row["split"] for row in readers.read(str(tmp_path))]
    for (_, chat, _), split in zip(turns, found, strict=True):
        splits.setdefault(chat, set()).add(split)
    assert all(len(names) == 1 for names in splits.values())
    assert [found.count(name) for name in ("held-out", "validation")] == [66, 63]
    assert found[-1] == "held-out"
    assert found[0] == "train"


def test_a_folder_names_the_files_that_are_not_read(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    for name in ("b.csv", "c.jsonl.zst", "d.csv", ".hidden", "README.md"):
        (tmp_path / name).write_text("x")
    for _ in range(2):
        assert len(list(readers.read(str(tmp_path)))) == 1
    assert capsys.readouterr().err == f"{tmp_path}: not read: 2 .csv, 1 .zst\n"


@pytest.mark.parametrize("kept", [-1, -9, 1], ids=["brace", "half a character", "one byte"])
def test_a_recorded_row_that_a_killed_writer_cut_is_a_bad_row(tmp_path, kept):
    rows = [json.dumps({"text": f"{number} ünï"}, ensure_ascii=False).encode() for number in range(3)]
    whole = b"\n".join(rows)
    (tmp_path / "rows").mkdir()
    (tmp_path / "manifest.json").write_text('{"recorded": true}')
    (tmp_path / "rows" / "0.jsonl").write_bytes(
        whole[: len(whole) - len(rows[-1]) + kept] if kept > 0 else whole[:kept]
    )
    (tmp_path / "rows" / "1.jsonl").write_bytes(rows[0] + b"\n")
    found = list(readers.read(str(tmp_path)))
    assert ["fault" in row for row in found] == [False, False, True, False]
    assert [row["text"] for row in found if "text" in row] == ["0 ünï", "1 ünï", "0 ünï"]


@pytest.mark.parametrize("count", [3, 7, 40, 199])
def test_a_small_source_has_documents_in_every_split(count, tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(count)))
    found = {split: [row["id"] for row in documents(str(file), split)] for split in SPLITS}
    assert all(found.values())
    assert len({each for ids in found.values() for each in ids}) == sum(map(len, found.values())) == count


def test_a_document_stays_in_its_split_wherever_it_stands(tmp_path):
    rows = [{"messages": [{**CHAT[0], "content": f"Question {i}?"}, CHAT[1]]} for i in range(1000)]
    (tmp_path / "b").mkdir()
    found = []
    for file, given in (
        ("chats.jsonl", rows),
        ("b/others.jsonl", [{"text": "another row"}, *reversed(rows)]),
    ):
        source = write(tmp_path / file, given)
        splits = {
            split: {row["messages"][0]["content"] for row in documents(str(source), split) if "messages" in row}
            for split in SPLITS
        }
        found.append(splits)
    assert found[0] == found[1]
    assert min(map(len, found[0].values())) > 20


def test_a_text_is_cut_at_the_same_place_wherever_it_stands(tmp_path):
    texts = [{"text": "".join(f"line {line} of text {i}\n" for line in range(50))} for i in range(20)]
    cuts = []
    for name, given in (("a.jsonl", texts), ("b.jsonl", [{"text": "another"}, *reversed(texts)])):
        found, _ = conversations(mixture_of([write(tmp_path / name, given)]), None, tiny_tokenizer(), Cut(8), 99)
        cuts.append(sorted(prompt.ids for prompt in found))
    assert cuts[0] == cuts[1]
    assert len(cuts[0]) == 20


def test_names_in_capitals_are_read_and_the_card_of_a_dataset_is_not(tmp_path):
    write(tmp_path / "CHATS.JSONL", [{"messages": CHAT}])
    (tmp_path / "README.md").write_text("# A dataset\n")
    assert contents(str(tmp_path)) == contents(str(tmp_path / "CHATS.JSONL")) == [{"messages": CHAT}]
    (tmp_path / "CHATS.JSONL").unlink()
    assert contents(str(tmp_path)) == [{"text": "# A dataset\n"}]
    (tmp_path / "chats.csv").write_text("prompt,completion\na,b\n")
    for source in (tmp_path, tmp_path / "chats.csv"):
        with pytest.raises(SourceError, match=r"readable file.*; write chats.csv as .jsonl"):
            contents(str(source))


def test_hidden_files_and_cards_of_a_folder_are_no_rows(tmp_path, capsys):
    """As in `datasets`: no file of an editor, of a Mac's archive or of an environment is trained on."""
    folder = tmp_path / "f"
    for name in ("more/.ipynb_checkpoints", "__MACOSX", ".venv/lib", "__pycache__", ".git"):
        (folder / name).mkdir(parents=True)
        (folder / name / "old.jsonl").write_text('{"text": "old"}\n')
    (folder / "._new.jsonl").write_bytes(b"\0\5\x16\7")
    (folder / ".DS_Store").write_text("x")
    write(folder / "more" / "new.jsonl", [{"messages": CHAT}])
    (folder / "__init__.py").write_text("x = 1\n")
    found = contents(str(folder))
    assert [row for row in found if "messages" in row] == [{"messages": CHAT}]
    assert [row for row in found if "text" in row] == [{"text": "x = 1\n"}]
    before, files = fingerprint(str(folder)), readers.source_files(folder)
    assert [file.name for file in files] == ["__init__.py", "new.jsonl"]
    (folder / "__init__.py").unlink()
    assert fingerprint(str(folder)) != before
    folder = folder.rename(tmp_path / "with cards")
    before = fingerprint(str(folder))
    for name in ("README_zh.md", "readme.txt", "LICENSE.txt", "LICENSE-2.0.md", "CHANGELOG.rst"):
        (folder / name).write_text("a card")
    for name in ("dataset_info.json", "more/state.json", "package.json", "config.json"):
        (folder / name).write_text(json.dumps({"name": "x"}, indent=1))
    (folder / ".DS_Store").write_text("changed")
    (folder / "1.png").write_text("x")
    assert contents(str(folder)) == [{"messages": CHAT}]
    assert fingerprint(str(folder)) == before
    said = capsys.readouterr().err
    assert "not read: 1 .png, 1 config.json, 1 dataset_info.json, 1 state.json, 1 package.json\n" in said
    assert contents(str(folder / "README_zh.md")) == [{"text": "a card"}], "named by the user"


def test_one_indented_chat_is_one_row(tmp_path):
    for name, text in (
        ("chat.json", json.dumps({"messages": CHAT}, indent=1)),
        ("other.json", '{ "messages":\n' + json.dumps(CHAT) + "\n}\n"),
        ("open.json", '{"messages": [\n' + json.dumps(CHAT)[1:] + "}\n"),
    ):
        (tmp_path / name).write_text(text)
        assert contents(str(tmp_path / name)) == [{"messages": CHAT}], name


def test_a_column_of_maps_is_one_line(tmp_path):
    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    table = pyarrow.table({"messages": pyarrow.array([[("role", "user")]], kind)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(SourceError, match=r"rows.parquet: a column among messages can't be read: .*map") as error:
        contents(str(tmp_path / "rows.parquet"))
    assert "\n" not in str(error.value)
