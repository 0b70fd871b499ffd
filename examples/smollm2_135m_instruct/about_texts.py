"""Prompts about texts that the model wrote: summaries and the like of one, a question about three.

    python examples/smollm2_135m_instruct/about_texts.py --model M --rows D > about.jsonl

D is a folder that `speculator data generate --sources self` has written for SmolLM2-135M-Instruct. What the model says
to these prompts is what the head loss_mask of long ones: `speculator data generate --target M --prompts about.jsonl`.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator

from datasets import Dataset
from transformers import AutoTokenizer

ASKS = (
    "Summarize the following text:",
    "Summarize: ",
    "Please give a short summary of this text.",
    "Write a summary of the article below in two or three sentences.",
    "What are the main points of this text?",
    "Rewrite the following text in simpler words:",
    "Correct and repeat this text:",
    "List the key facts of the following text:",
)
_SHORTEST, _PASSAGE, _QUESTION = 200, 700, 300  # characters


def chats(model: str, rows: str) -> Iterator[tuple[str, str]]:
    """What the user asked and what the model answered, where that is long enough to be asked about."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row in Dataset.load_from_disk(f"{rows}/rows"):
        begin = row["loss_mask"].index(1)
        asked = tokenizer.decode(row["input_ids"][:begin])
        answer = tokenizer.decode(row["input_ids"][begin:], skip_special_tokens=True).strip()
        if len(answer) > _SHORTEST:
            yield re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", asked, re.DOTALL)[-1].strip(), answer


def prompts(known: list[tuple[str, str]], draw: random.Random) -> Iterator[str]:
    """One of each answer, and as many of three answers and a question."""
    for _, answer in known:
        ask = draw.choice(ASKS)
        yield f"{ask}\n\n{answer}" if draw.random() < 0.7 else f"{answer}\n\n{ask.rstrip(': ')}."
    for _ in known:
        chosen = draw.sample(known, 3)
        question = draw.choice(chosen)[0][:_QUESTION]
        passages = "\n\n".join(f"Passage {i}: {answer[:_PASSAGE]}" for i, (_, answer) in enumerate(chosen, 1))
        if draw.random() < 0.6:
            yield f"Answer the question with the help of these passages.\n\n{passages}\n\nQuestion: {question}"
        else:
            yield f"{passages}\n\nBased on the text above, answer: {question}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="its tokenizer is read")
    parser.add_argument("--rows", required=True, help="folder of chats that it wrote")
    flags = parser.parse_args()
    draw = random.Random(0)
    made = list(prompts(list(chats(flags.model, flags.rows)), draw))
    draw.shuffle(made)
    for text in made:
        print(json.dumps({"messages": [{"role": "user", "content": text}]}))


if __name__ == "__main__":
    main()
