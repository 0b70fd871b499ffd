"""`python -m data prepare | generate | view`: sources, rows, chats, prompts, flags."""

from __future__ import annotations

import gzip
import json

from bad_inputs.refusal import NO_FILES, NO_OBJECT, NO_TEXT, Case, files, table

PREPARE = ["data", "prepare", "--target", "TARGET", "--seq_length", "16", "--output", "out"]
VIEW = ["data", "view", "--target", "TARGET"]
GENERATE = ["data", "generate", "--target", "TARGET", "--output", "out", "--max_new_tokens", "4"]
JSONL = [*PREPARE, "--sources", "bad.jsonl"]
PROMPTS = [*GENERATE, "--prompts", "bad.jsonl"]
USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}

ROWS = {
    "a list": [1, 2],
    "a text": "x",
    "a number": 7,
    "null": None,
    "no keys": {},
    "foreign keys": {"body": "x"},
    "text a number": {"text": 7},
    "text a list": {"text": ["x"]},
    "text null": {"text": None},
    "half a surrogate pair": {"text": "x\ud800"},
    "prompt alone": {"prompt": "x"},
    "completion a number": {"prompt": "x", "completion": 7},
    "messages a text": {"messages": "hi"},
    "messages empty": {"messages": []},
    "messages of texts": {"messages": ["hi"]},
    "messages an object": {"messages": {"role": "user"}},
    "role missing": {"messages": [{"content": "x"}, ANSWER]},
    "role a number": {"messages": [{"role": 7, "content": "x"}, ANSWER]},
    "role a list": {"messages": [{"role": ["user"], "content": "x"}, ANSWER]},
    "content missing": {"messages": [{"role": "user"}, ANSWER]},
    "content a number": {"messages": [{"role": "user", "content": 7}, ANSWER]},
    "content an object": {"messages": [{"role": "user", "content": {"a": 1}}, ANSWER]},
    "content half a surrogate pair": {"messages": [{"role": "user", "content": "\udfff"}, ANSWER]},
    "begins with the assistant": {"messages": [ANSWER, USER]},
    "nobody answers": {"messages": [USER]},
    "conversations a text": {"conversations": "hi"},
    "conversations of texts": {"conversations": ["hi"]},
    "conversations: from missing": {"conversations": [{"value": "x"}]},
    "conversations: from unknown": {"conversations": [{"from": "alien", "value": "x"}]},
    "conversations: from a list": {"conversations": [{"from": ["human"], "value": "x"}]},
    "conversations: from an object": {"conversations": [{"from": {"a": 1}, "value": "x"}]},
    "conversations: value a number": {"conversations": [{"from": "human", "value": 7}, {"from": "gpt", "value": "x"}]},
    "conversations: role a list": {"conversations": [{"role": ["user"], "content": "x"}]},
    "input_ids a text": {"input_ids": "1 2"},
    "input_ids empty": {"input_ids": []},
    "input_ids of texts": {"input_ids": ["a", "b"]},
    "input_ids negative": {"input_ids": [1, -2]},
    "input_ids too large": {"input_ids": [1, 10**9]},
    "input_ids huge": {"input_ids": [1, 10**30]},
    "input_ids of floats": {"input_ids": [1.5, 2.5]},
    "input_ids nested": {"input_ids": [[1, 2]]},
    "input_ids null within": {"input_ids": [1, None]},
    "loss_mask too short": {"input_ids": [1, 2, 3], "loss_mask": [1]},
    "loss_mask of twos": {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 2]},
    "loss_mask a number": {"input_ids": [1, 2, 3], "loss_mask": 1},
    "loss_mask all zero": {"input_ids": [1, 2, 3] * 16, "loss_mask": [0, 0, 0] * 16},
    "document_ids too short": {"input_ids": [1, 2, 3], "document_ids": [0]},
    "document_ids texts": {"input_ids": [1, 2, 3], "document_ids": ["a", "b", "c"]},
    "tools a text": {"messages": [USER, ANSWER], "tools": "x"},
    "tools a number": {"messages": [USER, ANSWER], "tools": 7},
}


def lines(row: object, count: int = 20) -> str:
    """A file of nothing but such rows, each made different where it can be."""
    return "".join(json.dumps({**row, "n": i} if isinstance(row, dict) else row) + "\n" for i in range(count))


SOURCES = [
    *files("prepare", JSONL, "bad.jsonl", {**NO_FILES, **NO_TEXT, **NO_OBJECT}),
    *(Case(f"prepare: rows: {name}", JSONL, "bad.jsonl", {"bad.jsonl": lines(row)}) for name, row in ROWS.items()),
    *files("prepare", [*PREPARE, "--sources", "bad.json"], "bad.json", {**NO_FILES, **NO_TEXT, **NO_OBJECT}),
    *files(
        "prepare",
        [*PREPARE, "--sources", "bad.jsonl.gz"],
        "bad.jsonl.gz",
        {
            "no gzip": '{"text": "x"}\n',
            "gzip cut short": gzip.compress(b'{"text": "x"}\n' * 1000)[:-20],
            "gzip of a bad sum": gzip.compress(b'{"text": "x"}\n' * 1000)[:-8] + bytes(8),
            "gzip of zeros": gzip.compress(bytes(30 << 20)),
        },
    ),
    *files(
        "prepare",
        [*PREPARE, "--sources", "bad.parquet"],
        "bad.parquet",
        {"no parquet": "PAR1", "parquet cut short": b"PAR1" + bytes(100) + b"PAR1", **NO_FILES},
    ),
    *files(
        "prepare",
        [*PREPARE, "--sources", "bad.txt"],
        "bad.txt",
        {**NO_FILES, **{kind: NO_TEXT[kind] for kind in ("empty", "binary", "UTF-16")}},
    ),
    Case("prepare: a folder of nothing", [*PREPARE, "--sources", "d"], "d", {"d/readme.doc": "x"}),
    Case("prepare: a folder with a pipe", [*PREPARE, "--sources", "d"], "d", {"d/a.jsonl": NO_FILES["a pipe"]}),
    Case("prepare: a folder of bad rows", [*PREPARE, "--sources", "d"], "a.jsonl", {"d/a.jsonl": "7\n"}),
    Case("prepare: a name with a NUL", [*PREPARE, "--sources", "a\0b.jsonl"], ""),
    Case("prepare: an empty name", [*PREPARE, "--sources", ""], "source"),
    Case("prepare: control characters", [*PREPARE, "--sources", "a\x1b[2Jb.jsonl"], "jsonl"),
    Case("prepare: not on the hub", [*PREPARE, "--sources", "org/name"], "org/name"),
    Case("prepare: a split of nothing", [*PREPARE, "--sources", "org/name:"], "org/name"),
    Case("prepare: a weight of 0", [*PREPARE, "--sources", "TEXT@0"], "weight"),
    Case("prepare: a weight for one", [*PREPARE, "--sources", "TEXT@1", "CHATS"], "weight"),
    Case("prepare: chats without a template", [*PREPARE, "--target", "PLAIN", "--sources", "CHATS"], "chat template"),
    *(
        Case(f"prepare: a datasets folder, {name}", [*PREPARE, "--sources", "d"], "d", {f"d/{file}": content})
        for name, file, content in [
            ("state.json empty", "state.json", ""),
            ("state.json a list", "state.json", "[1]"),
            ("state.json without files", "state.json", "{}"),
            ("dataset_dict.json a list", "dataset_dict.json", "[1]"),
            ("dataset_dict.json of nothing", "dataset_dict.json", "{}"),
            ("dataset_dict.json of a missing split", "dataset_dict.json", '{"splits": ["train"]}'),
            ("state.json UTF-16", "state.json", "{}".encode("utf-16")),
        ]
    ),
]

FLAGS = [
    *(
        Case(f"prepare: {' '.join(flags)}", ["data", "prepare", *flags], mentions)
        for flags, mentions in [
            ([], "required"),
            (["--target", "TARGET", "--sources", "TEXT", "--output", "out"], "seq_length"),
            ([*PREPARE[2:], "--sources"], "sources"),
            ([*PREPARE[2:], "--sources", "TEXT", "--seq_length", "1"], "seq_length"),
            ([*PREPARE[2:], "--sources", "TEXT", "--seq_length", "-1"], "seq_length"),
            ([*PREPARE[2:], "--sources", "TEXT", "--seq_length", "x"], "seq_length"),
            ([*PREPARE[2:], "--sources", "TEXT", "--seq_length", "1000000000"], "row"),
            ([*PREPARE[2:], "--sources", "TEXT", "--max_tokens", "0"], "max_tokens"),
            ([*PREPARE[2:], "--sources", "TEXT", "--max_tokens", "-5"], "max_tokens"),
            ([*PREPARE[2:], "--sources", "TEXT", "--max_package_bytes", "-5"], "max_package_bytes"),
            ([*PREPARE[2:], "--sources", "TEXT", "--num_proc", "0"], "num_proc"),
            ([*PREPARE[2:], "--sources", "TEXT", "--nonsense"], "nonsense"),
            ([*PREPARE[2:], "--sources", "TEXT", "--target", ""], "''|target"),
            ([*PREPARE[2:], "--sources", "TEXT", "--target", "nowhere"], "nowhere"),
            ([*PREPARE[2:], "--sources", "TEXT", "--target", "a\0b"], ""),
            ([*PREPARE[2:], "--sources", "TEXT", "--output", "no/out"], "no"),
            ([*PREPARE[2:], "--sources", "TEXT", "--output", "a\0b"], ""),
            ([*PREPARE[2:], "--sources", "TEXT", "--output", ""], "output"),
            ([*PREPARE[2:], "--sources", "TEXT", "--output", "pipe"], "pipe"),
        ]
    ),
    *(
        Case(f"view: {' '.join(flags)}", ["data", "view", *flags], mentions)
        for flags, mentions in [
            ([], "required"),
            (["TEXT"], "target"),
            (["--target", "TARGET"], "source"),
            (["TEXT", *VIEW[2:], "--rows", "0"], "rows"),
            (["TEXT", *VIEW[2:], "--rows", "-1"], "rows"),
            (["TEXT", *VIEW[2:], "--rows", "many"], "rows"),
            (["nowhere.jsonl", *VIEW[2:]], "nowhere.jsonl"),
            (["a\0b.jsonl", *VIEW[2:]], ""),
            (["", *VIEW[2:]], "source"),
            (["TEXT", "--target", "nowhere"], "nowhere"),
            (["TEXT", "--target", "MLP"], "mlp"),
            (["CHATS", "--target", "PLAIN"], "chat template"),
        ]
    ),
    Case("data: no command", ["data"], "command"),
    Case("data: a foreign command", ["data", "destroy"], "destroy"),
    *files("view", [*VIEW, "bad.jsonl"], "bad.jsonl", {**NO_FILES, **NO_TEXT, **NO_OBJECT}),
    *(
        Case(f"generate: {' '.join(flags)}", [*GENERATE, *flags], mentions)
        for flags, mentions in [
            ([], "required"),
            (["--prompts", "PROMPTS", "--sources", "TEXT"], "not allowed"),
            (["--prompts", "PROMPTS", "--speculator", "MLP", "--server", "http://x"], "not allowed"),
            (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
            (["--prompts", "a\0b.jsonl"], ""),
            (["--prompts", ""], "prompts"),
            (["--sources", "nowhere.jsonl"], "nowhere.jsonl"),
            (["--sources", "TEXT", "--split", "nonsense"], "nonsense"),
            (["--sources", "TEXT", "--prompt_tokens", "0"], "prompt_tokens"),
            (["--sources", "TEXT", "--prompt_tokens", "1000000"], "1000000"),
            (["--prompts", "PROMPTS", "--max_rows", "0"], "max_rows"),
            (["--prompts", "PROMPTS", "--max_new_tokens", "0"], "max_new_tokens"),
            (["--prompts", "PROMPTS", "--max_new_tokens", "-5"], "max_new_tokens"),
            (["--prompts", "PROMPTS", "--temperature", "-1"], "temperature"),
            (["--prompts", "PROMPTS", "--temperature", "nan"], "temperature"),
            (["--prompts", "PROMPTS", "--temperature", "inf"], "temperature"),
            (["--prompts", "PROMPTS", "--temperature", "1e39"], "temperature"),
            (["--prompts", "PROMPTS", "--top_k", "-1"], "top_k"),
            (["--prompts", "PROMPTS", "--top_p", "0"], "top_p"),
            (["--prompts", "PROMPTS", "--top_p", "nan"], "top_p"),
            (["--prompts", "PROMPTS", "--min_p", "1"], "min_p"),
            (["--prompts", "PROMPTS", "--batch_size", "0"], "batch_size"),
            (["--prompts", "PROMPTS", "--num_speculative_tokens", "2"], "num_speculative_tokens"),
            (["--prompts", "PROMPTS", "--speculator", "MLP", "--num_speculative_tokens", "99"], "99"),
            (["--prompts", "PROMPTS", "--speculator", "nowhere"], "nowhere"),
            (["--prompts", "PROMPTS", "--speculator", "TARGET"], "architectures"),
            (["--prompts", "PROMPTS", "--speculator", ""], "speculator"),
            (["--prompts", "PROMPTS", "--seed", str(2**70)], "seed"),
            (["--prompts", "PROMPTS", "--target", "nowhere"], "nowhere"),
            (["--prompts", "PROMPTS", "--output", "no/such/out\0"], ""),
            (["--prompts", "PROMPTS", "--output", "pipe"], "pipe"),
            (["--prompts", "PROMPTS", "--server", ""], "server"),
            (["--prompts", "PROMPTS", "--server", "not a url"], "server"),
            (["--prompts", "PROMPTS", "--server", "ftp://127.0.0.1"], "127.0.0.1"),
            (["--prompts", "PROMPTS", "--server", "http://127.0.0.1:99999"], "99999"),
            (["--prompts", "PROMPTS", "--server", "http://[::1"], "server"),
            (["--prompts", "PROMPTS", "--server", "http://a\x1bb"], "server"),
        ]
    ),
    Case(
        "generate: nobody answers",
        [*GENERATE, "--prompts", "PROMPTS", "--server", "http://127.0.0.1:1"],
        "127.0.0.1:1",
        begins="out",
    ),
    Case("generate: a foreign folder", [*GENERATE, "--prompts", "PROMPTS"], "out", {"out/thesis.txt": "ten years"}),
    Case("generate: a file", [*GENERATE, "--prompts", "PROMPTS"], "out", {"out": "mine"}),
    *files("generate", PROMPTS, "bad.jsonl", {**NO_FILES, **NO_TEXT, **NO_OBJECT}),
    *(
        Case(f"generate: rows: {name}", PROMPTS, "bad.jsonl|prompt", {"bad.jsonl": lines(row)})
        for name, row in {
            "text": {"text": "x"},
            "prompt a number": {"prompt": 7},
            "prompt empty": {"prompt": ""},
            "prompt too long": {"prompt": "x y " * 500},
            "prompt half a surrogate pair": {"prompt": "\ud800"},
            **{name: row for name, row in ROWS.items() if name.startswith("messages")},
        }.items()
    ),
]


@table(SOURCES)
def test_a_wrong_source_is_named(case, refused):
    refused(case)


@table(FLAGS)
def test_a_wrong_flag_or_prompt_is_named(case, refused):
    refused(case)
