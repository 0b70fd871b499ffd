"""The server with OpenAI's own client, streamed and whole."""

import pytest
from serving_here import serving

from speculator import Sampling, generate
from speculator.decoding.streaming import decode

openai = pytest.importorskip("openai")
PROMPT = [5, 6, 7, 8]
CHAT = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is 2 + 2?"}]
FIELDS = {"n": 2, "seed": 4, "temperature": 0.9, "top_p": 0.95, "user": "me", "frequency_penalty": 0}
FIELDS |= {"presence_penalty": 0, "logit_bias": {}, "stop": ["nowhere"]}
EXTRA = {"top_k": 50, "min_p": 0.001, "return_token_ids": True}
SAMPLING = Sampling(temperature=0.9, top_k=50, top_p=0.95, min_p=0.001)


def expected_of(target, drafter, prompt, count: int) -> list[list[int]]:
    own = [
        Sampling(
            temperature=SAMPLING.temperature,
            top_k=SAMPLING.top_k,
            top_p=SAMPLING.top_p,
            min_p=SAMPLING.min_p,
            seed=seed,
        )
        for seed in (4, 5)
    ]
    return generate(target, drafter, [prompt] * 2, own, max_new_tokens=count).tokens


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server}/v1", api_key="any", max_retries=0)


def test_the_openai_client_gets_the_engines_completions(client, chat_target, drafter):
    expected = expected_of(chat_target, drafter, PROMPT, 10)
    how = {"model": "tiny", "prompt": PROMPT, "max_tokens": 10, "logprobs": 2, "extra_body": EXTRA, **FIELDS}
    whole = client.completions.create(**how)
    assert [choice.token_ids for choice in whole.choices] == expected
    assert [choice.text for choice in whole.choices] == [decode(chat_target.tokenizer, row) for row in expected]
    assert whole.object == "text_completion"
    assert whole.usage.completion_tokens == sum(map(len, expected))
    assert [len(choice.logprobs.token_logprobs) for choice in whole.choices] == [len(row) for row in expected]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    parts = list(client.completions.create(**how, **options))
    texts, tokens, ends = ["", ""], [[], []], [None, None]
    for part in parts[:-1]:
        (choice,) = part.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.token_ids
        ends[choice.index] = choice.finish_reason
    assert tokens == expected
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert parts[-1].choices == []
    assert parts[-1].usage == whole.usage
    assert len({part.id for part in parts}) == 1


def test_the_openai_client_gets_the_engines_chats(client, chat_target, drafter):
    ids = chat_target.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    expected = expected_of(chat_target, drafter, ids, 10)
    how = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 10, "logprobs": True, "top_logprobs": 2}
    how |= {"extra_body": EXTRA, "response_format": {"type": "text"}, **FIELDS}
    whole = client.chat.completions.create(**how)
    assert [choice.token_ids for choice in whole.choices] == expected
    texts = [decode(chat_target.tokenizer, row) for row in expected]
    assert [choice.message.content for choice in whole.choices] == texts
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.prompt_tokens == len(ids)
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    parts = list(client.chat.completions.create(**how, stream=True))
    shown = ["", ""]
    for part in parts:
        shown[part.choices[0].index] += part.choices[0].delta.content or ""
    assert shown == texts
    ended = [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason]
    assert sorted(ended) == sorted(choice.finish_reason for choice in whole.choices)


def test_errors_become_the_clients_exceptions(client):
    def ask(**fields):
        how = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, **fields}
        return client.completions.create(**how)

    with pytest.raises(openai.NotFoundError):
        ask(model="other")
    with pytest.raises(openai.BadRequestError) as raised:
        ask(echo=True)
    assert raised.value.param == "echo"
    with pytest.raises(openai.BadRequestError):
        ask(prompt=[1] * 300)


def test_a_models_id_may_have_slashes(chat_target):
    with serving(chat_target, name="org/tiny") as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        assert [client.models.retrieve("org/tiny").id, *(model.id for model in client.models.list())] == [
            "org/tiny"
        ] * 2
        assert client.completions.create(model="org/tiny", prompt=PROMPT, max_tokens=1).model == "org/tiny"


def test_a_wrong_key_and_a_full_queue_become_the_clients_exceptions(chat_target):
    with serving(chat_target, api_key="secret", slots=1, max_queue=0) as (url, _):
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="other", max_retries=0).models.list()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        how = {"model": "tiny", "prompt": [9], "max_tokens": 200, "temperature": 0, "stream": True}
        with client.completions.create(**how) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError):
                client.completions.create(**how)
