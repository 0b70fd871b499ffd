"""Prompts about code, and some about everyday matters.

    python examples/qwen2.5_coder_0.5b_instruct/prompts.py tasks --rows 2000 > tasks.jsonl

Kinds: tasks (instructions in eleven languages), functions (signatures and docstrings of Python's standard library to
complete), reading (its functions to explain, test, review, repair or translate), tools (questions with tools that the
template describes), everyday (questions without code), mathematics (needs `--file`, with rows of "question").
`speculator data generate --prompts` answers them. Answer conversations by `--sources FILE --turns 3`.
"""

import argparse
import ast
import gzip
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LANGUAGES = ("Python", "Python", "JavaScript", "TypeScript", "C++", "Go", "Rust", "SQL", "Bash", "Java", "C", "C#")
_NAMES = ("users", "orders", "products", "invoices", "sensors", "events", "employees", "sessions", "tickets", "books")
_PROGRAMS = """
reads a CSV file and prints the average of every numeric column
counts the words of a text file and prints the twenty most frequent ones
merges two sorted lists without using a library function
implements an LRU cache with a fixed capacity
parses a date in the form YYYY-MM-DD and returns the day of the week
checks whether a string has balanced brackets
computes the edit distance of two strings
implements a binary search tree with insert, delete and in-order traversal
finds the shortest path in a weighted graph
groups a list of {names} by a field and sums another field
validates an email address and explains what is wrong with it
converts Roman numerals to integers and back
implements a rate limiter with a token bucket
downloads a list of URLs concurrently with a limit on open connections
retries a failing operation with exponential backoff and jitter
reads configuration from environment variables with defaults
writes structured log lines as JSON
renders a table of {names} as Markdown
paginates a list of {names}
removes duplicates from a list and keeps the order
rotates a matrix by 90 degrees in place
generates all permutations of a list iteratively
solves the N queens problem
implements a priority queue on a binary heap
compresses a string by run-length encoding
splits a large file into parts and joins them again
watches a folder and prints the files that change
computes the SHA-256 digest of every file below a folder
finds the longest common prefix of a list of strings
evaluates an arithmetic expression with parentheses
implements a trie with prefix search
flattens a nested structure into a map with dotted keys
schedules tasks with dependencies in topological order
simulates a bank account with deposits, withdrawals and a history
implements matrix multiplication and checks the shapes
parses the query string of a URL
implements a simple publish and subscribe system
computes prime numbers up to n with a sieve
finds all anagrams in a list of words
converts between Celsius, Fahrenheit and Kelvin with error handling
reads lines from standard input until a blank line and reverses their order
implements an iterator over the nodes of a linked list
detects a cycle in a linked list
computes the moving average of a stream of numbers
samples k lines of a long file at random
escapes HTML and unescapes it again
implements a thread-safe counter
encodes and decodes base64 without a library
computes the convex hull of a set of points
implements quicksort with a random pivot
implements merge sort for a linked list
finds the k-th largest element of an array
counts inversions of an array
implements a state machine for a traffic light
implements tic-tac-toe for two players in a terminal
plays Conway's game of life on a grid that wraps around
formats a number of bytes for a person, such as 1.5 MB
parses command line arguments with two subcommands
implements a small key-value store that appends to a file
diffs two lists of {names} and reports what was added, removed and changed
builds an index of the words in a set of documents
computes the greatest common divisor and the modular inverse
validates a credit card number with the Luhn algorithm
implements a circular buffer
implements an undo and redo stack for a text editor
computes tf-idf of a small set of documents
does k-means clustering of points in the plane
fits a straight line by least squares
implements a dot product and the cosine similarity of vectors
implements gradient descent for logistic regression
translates a word to Pig Latin
checks a Sudoku board
finds the maximum sum of a subarray
solves the knapsack problem by dynamic programming
counts the ways to climb n stairs with steps of one or two
finds all paths from a start to an end in a grid with walls
implements a bloom filter
computes a CRC32 checksum
implements a simple tokenizer for a calculator
parses a subset of JSON by recursive descent
matches a wildcard pattern with * and ?
finds overlapping intervals and merges them
picks a random item by weight
implements an event emitter with once and off
debounces and throttles a function
memoizes a function with a time limit for entries
deep-copies and deep-compares nested objects
implements a promise pool or the language's equivalent
serves a REST endpoint for {names} with create, read, update and delete
sends a request to an HTTP API and handles errors and timeouts
authenticates a request by a bearer token
stores {names} in SQLite and queries them by date
reads a JSON file of {names} and writes it as CSV
computes statistics of {names} per month
builds a form for {names} with validation messages
writes a middleware that measures the time of each request
implements pagination with a cursor for {names}
implements dependency injection by hand for a small service
models {names} with inheritance and an abstract base class
uses generics to write a container for {names}
defines an interface for storage and two implementations, in memory and on disk
handles errors of three kinds with types of their own
writes unit tests for a shopping cart
writes a producer and a consumer that share a queue
computes a checksum of {names} in parallel and combines the results
implements a ring of workers that pass messages
""".strip().splitlines()
_QUERIES = """
lists the ten {names} with the most entries in the last 30 days
computes a running total per day of {names}
finds duplicates in {names} by two columns and deletes all but the newest
joins {names} with customers and shows those without a match
creates a table for {names} with keys, constraints and an index
ranks {names} within each category with a window function
pivots the monthly counts of {names} into columns
upserts rows into {names}
computes the median of a column of {names}
finds gaps in the dates of {names}
""".strip().splitlines()
_SHELL = """
renames all files in a folder to lower case
finds the ten largest files below a folder
backs up a folder to a dated archive and deletes archives older than a week
shows the processes that use most memory
counts requests per address in an access log
waits until a port answers, with a time limit
reads a .env file and exports its variables
checks that the needed commands are installed and prints those that are not
runs a command on every line of a file, four at a time
parses options with getopts and prints usage
""".strip().splitlines()
_ASK = (
    "Write {a} {language} program that {what}.",
    "Write {a} {language} function that {what}.",
    "In {language}, write code that {what}. Add comments.",
    "How do I write {language} code that {what}?",
    "I need {a} {language} snippet that {what}. Keep it short.",
    "Please implement this in {language}: code that {what}. Show an example of how to use it.",
    "{language}: {what}. Only code, no explanation.",
    "Give me a well-structured {language} implementation that {what}, then explain how it works step by step.",
    "Write {a} {language} class that {what}, with tests.",
)
_QUESTIONS = """
What is the difference between {x} and {y} in {language}?
When should I use {x} instead of {y}?
Explain {x} in {language} to a beginner, with an example.
What are common mistakes with {x} in {language}?
Show three ways to use {x} in {language} and compare them.
How does {x} work under the hood?
How can I test code that uses {x} in {language}?
What does this error mean in {language}, and how do I fix it: a problem with {x}?
""".strip().splitlines()
_TOPICS = (
    """
threads|async functions|generators|lists|arrays|hash maps|sets|closures|decorators|interfaces|abstract classes
pointers|references|garbage collection|exceptions|error values|generics|macros|recursion|iterators|promises|streams
locks|channels|transactions|indexes|joins|views|foreign keys|environment variables|regular expressions|modules
packages|virtual environments|type hints|enums|tuples|structs|immutability|deep copies|default arguments|slices
string formatting|unit tests|mocks|dependency injection|REST|GraphQL|WebSockets|HTTP caching|cookies|sessions|JWT
hashing|encryption|logging|profiling|memory leaks|race conditions|deadlocks|event loops|middleware|ORMs|migrations
docker containers|git branches|rebasing|merge conflicts|code review|continuous integration|design patterns|singletons
factories|observers|linked lists|binary trees|heaps|graphs|dynamic programming|greedy algorithms|big O notation
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
_COMPLETE = (
    "Write a Python function with this signature and docstring.\n\n```python\n{head}\n```",
    "Complete this function:\n\n```python\n{head}\n```",
    "Implement this Python function:\n\n{head}",
    "How can I write a Python function called `{name}`? Its description: {doc}",
    "Write this function in {language}. Its description: {doc}",
)
_READ = (
    "Explain what this code does.\n\n```python\n{code}\n```",
    "{code}\n\nExplain this function line by line.",
    "Write unit tests with pytest for this function.\n\n```python\n{code}\n```",
    "Review this code. Name problems and suggest improvements.\n\n```python\n{code}\n```",
    "Refactor this function so that it is easier to read, and keep its behaviour.\n\n```python\n{code}\n```",
    "Add type hints and a docstring to this function.\n\n```python\n{code}\n```",
    "Translate this Python function to {language}.\n\n```python\n{code}\n```",
    "This function has a bug. Find it and write the corrected function.\n\n```python\n{broken}\n```",
    "```python\n{broken}\n```\n\nThis gives a wrong result. What is wrong? Fix it.",
    "What is the time complexity of this function, and can it be faster?\n\n```python\n{code}\n```",
    "Add error handling and logging to this code.\n\n```python\n{code}\n```",
)
_BREAKS = (
    (" < ", " <= "),
    (" == ", " != "),
    (" + 1", ""),
    ("not ", ""),
    (" and ", " or "),
    ("[0]", "[1]"),
    (" - ", " + "),
)
_FOLLOW = (
    "Now add error handling.",
    "Can you make it shorter?",
    "Please write tests for it.",
    "Translate it to {language}.",
    "Explain the most difficult part.",
    "What happens with empty input?",
    "Add type annotations and comments.",
    "How would you make this faster?",
    "Show how to use it in a small program.",
    "Rewrite it as a class.",
)
_EVERYDAY = """
Write a polite email to {who} about {matter}.
Give me five ideas for {matter}.
Explain {matter} in simple words.
What should I know before {matter}?
Write a short story about {who} and {matter}.
Summarize the advantages and disadvantages of {matter}.
Plan {matter} for a week, as a list.
Write a short poem about {matter}.
How do I talk to {who} about {matter}?
Compare two ways of {matter} and recommend one.
""".strip().splitlines()
_WHO = (
    """
my landlord|a new colleague|my teacher|a customer|the city council|my grandmother|a friend who moved away|my manager
a neighbour|the support team|a recruiter|my daughter|a pen friend|a doctor|the sports club
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
_MATTERS = (
    """
a late delivery|learning to cook|a broken heating|planning a birthday party|saving energy at home|growing tomatoes
moving to another city|learning a language|running a marathon|buying a used car|travelling by train|adopting a dog
getting up early|working from home|writing a thesis|a vegetarian dinner|photographing birds|repairing a bicycle
reading more books|a job interview|climate change|the water cycle|how vaccines work|inflation|black holes
the stock market|keeping a diary|teaching children to swim|a weekend in the mountains|public libraries
sleeping better|chess openings
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
_TOOLS = {
    "get_weather": (
        "Get the weather of a city",
        {"city": "string", "day": "string"},
        "What is the weather in {a} {when}?",
    ),
    "run_python": ("Run Python code and return its output", {"code": "string"}, "Use Python to compute {sum}."),
    "search_files": (
        "Search files by a pattern",
        {"pattern": "string", "folder": "string"},
        "Which files in {folder} contain the word {word}?",
    ),
    "read_file": ("Read a text file", {"path": "string"}, "Show me what is in {folder}/{word}.py."),
    "write_file": (
        "Write a text file",
        {"path": "string", "text": "string"},
        "Save a small Python script that prints {word} as {folder}/{word}.py.",
    ),
    "run_sql": (
        "Run a query on the database and return rows",
        {"query": "string"},
        "How many {names} were added {when}?",
    ),
    "send_email": (
        "Send an email",
        {"to": "string", "subject": "string", "body": "string"},
        "Tell {who} by email that the {word} is ready.",
    ),
    "convert": (
        "Convert an amount of one currency to another",
        {"amount": "number", "source": "string", "to": "string"},
        "How much are {n} dollars in euros?",
    ),
    "git_log": (
        "List the last commits of a repository",
        {"repository": "string", "count": "integer"},
        "Show the last {n} commits of {word}.",
    ),
    "create_issue": (
        "Create an issue in the tracker",
        {"title": "string", "body": "string"},
        "Open an issue: the {word} page crashes when {names} are empty.",
    ),
}
_CITIES = ("Lisbon", "Nairobi", "Oslo", "Kyoto", "Lima", "Toronto", "Hanoi", "Vienna", "Cairo", "Adelaide")
_FIGURES = ("sum", "product", "mean", "variance")
_WHEN = ("today", "tomorrow", "on Friday", "next week", "last month", "this year", "yesterday")
_WORDS = ("login", "report", "parser", "invoice", "backup", "cart", "profile", "search", "cache", "billing", "upload")
_FOLDERS = ("src", "tests", "app/models", "scripts", "services/api", "lib", "web/components", "docs")


def _article(word: str) -> str:
    return "an" if word[0] in "AEIOU" else "a"


def tasks(draw: random.Random) -> Iterator[dict]:
    while True:
        language = draw.choice(LANGUAGES)
        if draw.random() < 0.25:
            x, y = draw.sample(_TOPICS, 2)
            text = draw.choice(_QUESTIONS).format(x=x, y=y, language=language)
        else:
            what = draw.choice({"SQL": _QUERIES, "Bash": _SHELL}.get(language, _PROGRAMS))
            if language == "SQL" and draw.random() < 0.5:
                language = draw.choice(("PostgreSQL", "SQLite", "MySQL"))
            what = what.format(names=draw.choice(_NAMES))
            text = draw.choice(_ASK).format(a=_article(language), language=language, what=what)
        yield _chat(text[0].upper() + text[1:])


def conversations(draw: random.Random) -> Iterator[dict]:
    """User turns of chats: a task and one or two requests that follow it (`data generate --sources FILE`)."""
    for task in tasks(draw):
        later = [each.format(language=draw.choice(LANGUAGES)) for each in draw.sample(_FOLLOW, draw.choice((1, 1, 2)))]
        yield {"messages": [each for turn in (task["messages"][0]["content"], *later) for each in _turn(turn)]}


def _turn(text: str) -> list[dict]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "..."}]


def _functions() -> Iterator[tuple[ast.FunctionDef, str, str]]:
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"} & set(file.parts):
            continue
        try:
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield node, ast.get_docstring(node) or "", ast.unparse(node)


def functions(draw: random.Random) -> Iterator[dict]:
    found = [each for each in _functions() if 60 < len(each[1]) < 700]
    draw.shuffle(found)
    for node, doc, _ in found:
        head = f'def {node.name}({ast.unparse(node.args)}):\n    """{doc}"""'
        yield _chat(draw.choice(_COMPLETE).format(head=head, name=node.name, doc=doc, language=draw.choice(LANGUAGES)))


def reading(draw: random.Random) -> Iterator[dict]:
    found = [each for each in _functions() if 200 < len(each[2]) < 1500]
    draw.shuffle(found)
    for _, _, code in found:
        broken = code
        for old, new in draw.sample(_BREAKS, len(_BREAKS)):
            if old in code:
                broken = code.replace(old, new, 1)
                break
        yield _chat(draw.choice(_READ).format(code=code, broken=broken, language=draw.choice(LANGUAGES)))


def tools(draw: random.Random) -> Iterator[dict]:
    while True:
        names = draw.sample(sorted(_TOOLS), draw.randint(1, 4))
        given = [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": _TOOLS[name][0],
                    "parameters": {
                        "type": "object",
                        "properties": {key: {"type": kind} for key, kind in _TOOLS[name][1].items()},
                        "required": list(_TOOLS[name][1]),
                    },
                },
            }
            for name in names
        ]
        question = _TOOLS[draw.choice(names)][2].format(
            a=draw.choice(_CITIES),
            when=draw.choice(_WHEN),
            word=draw.choice(_WORDS),
            folder=draw.choice(_FOLDERS),
            names=draw.choice(_NAMES),
            who=draw.choice(_WHO),
            n=draw.randint(3, 900),
            sum=f"the {draw.choice(_FIGURES)} of the numbers from {draw.randint(1, 9)} to {draw.randint(12, 400)}",
        )
        yield {"messages": [{"role": "user", "content": question}], "tools": given}


def everyday(draw: random.Random) -> Iterator[dict]:
    while True:
        yield _chat(draw.choice(_EVERYDAY).format(who=draw.choice(_WHO), matter=draw.choice(_MATTERS)))


def mathematics(draw: random.Random, file: Path) -> Iterator[dict]:
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
        found = [json.loads(line)["question"] for line in lines]
    draw.shuffle(found)
    for question in found:
        yield _chat(
            draw.choice(("{}", "{}\nThink step by step.", "Solve this with a Python program: {}")).format(question)
        )


def _chat(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


def main() -> None:
    kinds = {each.__name__: each for each in (tasks, conversations, functions, reading, tools, everyday)}
    with_file = {mathematics.__name__: mathematics}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=[*kinds, *with_file])
    parser.add_argument("--rows", type=int, default=1000, help="prompts to print, all different (default: 1000)")
    parser.add_argument("--skip", type=int, default=0, help="prompts to leave out before them (default: 0)")
    parser.add_argument("--file", type=Path, help=".jsonl file, maybe .gz, of mathematics")
    flags = parser.parse_args()
    draw = random.Random(flags.kind)
    made = kinds[flags.kind](draw) if flags.kind in kinds else with_file[flags.kind](draw, flags.file)
    seen: set[str] = set()
    misses = 0
    for row in made:
        line = json.dumps(row, ensure_ascii=False)
        misses += line in seen
        if line not in seen:
            seen.add(line)
            if len(seen) > flags.skip:
                print(line)
        if len(seen) == flags.skip + flags.rows or misses > 100_000:
            break


if __name__ == "__main__":
    main()
