"""A draft head as vLLM's method "eagle" drives it.

vLLM's proposer calls the model once with the target's hidden states (after its final norm) of every position and the
tokens after them, then once for each further token of the draft: the second of the two tensors that the model returned
comes back as `hidden_states`, of the drafting rows only, in the order of the batch. That tensor has the target's width
D, and nothing else tells the first call from a later one. So what comes back is not the head's state but a tag:

    [inf, step, row in base 128 (3 digits), 0 ...]

A target's hidden state is finite, so an `inf` in front says that the row was made here. The states themselves, of any
width, stay in a buffer of the model, where the tag's row finds them. The step is thus part of the data: it is right
whatever is called in between, in chunked prefill, after preemption, for requests that come and go, and in a captured
graph, which replays no Python.

`n_predict`, `inner_dim` and the other fields are those of the speculator project's heads; so is the arithmetic:
s = gelu(norm(proj_i(s) + alpha * emb_i(token))).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from types import SimpleNamespace

import torch
import vllm
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention

logger = init_logger(__name__)

RAN_WITH = "0.32.0"
_EPS = 1e-6
_BASE = 128  # digits of a row's number: whole numbers up to 256 are exact in bfloat16
_DIGITS = 3
_MARK, _STEP, _ROW = 0, 1, 2  # columns of a tag
_TAG = _ROW + _DIGITS


def check_proposer() -> None:
    """Check that the installed vLLM calls a head as this module expects; of the tested version nothing is checked.

    Logs a warning if another version looks the same.

    Raises:
        RuntimeError: it calls a head in another way.
    """
    if vllm.__version__.split("+")[0] == RAN_WITH:
        return
    here = f"speculator-vllm: vLLM {vllm.__version__} is not {RAN_WITH}, with which this ran, and"
    try:
        from vllm.v1.spec_decode.eagle import EagleProposer
    except ImportError as error:
        raise RuntimeError(f"{here} has no vllm.v1.spec_decode.eagle.EagleProposer: {error}") from None
    wanted = {"target_token_ids", "target_hidden_states", "next_token_ids"}
    if missing := wanted - set(inspect.signature(EagleProposer.propose).parameters):
        raise RuntimeError(f"{here} its EagleProposer.propose takes no {', '.join(sorted(missing))}")
    body = inspect.getsource(EagleProposer.propose)
    for step in ("self.model(**model_kwargs)", "last_hidden_states, hidden_states = ret_hidden_states"):
        if step not in body:
            raise RuntimeError(f"{here} its EagleProposer.propose has no line `{step}`: it calls a head in another way")
    logger.warning("%s looks the same: compare the accepted tokens per position with the head's own", here)


class MLPHead(nn.Module):
    """The architecture `EagleMLPSpeculator`.

    Sizes: n rows of a call, D the target's width, I the head's, V the vocabulary.

    A step drafts one position. The steps of an untied head have weights of their own, stacked along the first
    dimension; a tied head has stacks of one.

    Raises:
        ValueError: the method is not "eagle", a draft has more tokens than the head has steps, or the target's width
            or vocabulary is not the head's.
    """

    has_own_embed_tokens = has_own_lm_head = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        check_proposer()
        about, target = vllm_config.speculative_config, vllm_config.model_config
        config = about.draft_model_config.hf_config
        if about.method != "eagle":
            raise ValueError(f'speculator-vllm: the method has to be "eagle", not "{about.method}"')
        steps, wide = config.n_predict, target.get_hidden_size()
        if about.num_speculative_tokens > steps:
            asked = about.num_speculative_tokens
            raise ValueError(f"speculator-vllm: num_speculative_tokens is {asked}, but this head drafts up to {steps}")
        if (wide, target.get_vocab_size()) != (config.emb_dim, config.vocab_size):
            raise ValueError(
                f"speculator-vllm: the head is for a target of width {config.emb_dim} and {config.vocab_size} tokens, "
                f"this one has {wide} and {target.get_vocab_size()}"
            )
        self.config, inner = config, config.inner_dim
        state_weight = 0.5 ** (0.5 / steps)
        self.alpha = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight
        drafted = getattr(config, "draft_vocab_size", None)
        count = 1 if config.tie_weights else steps
        later = 1 if config.tie_weights else steps - 1
        shapes = {
            "emb": (count, config.vocab_size, inner),
            "proj": (inner, wide),  # of the first step, which reads the target's state
            "later_proj": (later, inner, inner),
            "head": (count, drafted or config.vocab_size, inner),
            **dict.fromkeys(("ln_weight", "ln_bias"), (count, inner)),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape), requires_grad=False))
        tokens = torch.zeros(drafted, dtype=torch.int64) if drafted else None
        self.register_buffer("draft_tokens", tokens, persistent=False)
        rows = vllm_config.scheduler_config.max_num_batched_tokens
        self.register_buffer("states", torch.zeros(rows, inner), persistent=False)
        # vLLM wants a layer with a KV cache in every drafter, after the target's last one. It is never called.
        heads, parallel = target.get_head_size(), vllm_config.parallel_config
        self.attn = Attention(
            target.get_num_attention_heads(parallel),
            heads,
            heads**-0.5,
            num_kv_heads=target.get_num_kv_heads(parallel),
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix + '.' if prefix else ''}model.layers.{target.get_num_layers(parallel)}.self_attn.attn",
        )
        # It also compares these with the target's, to share them; nothing here can be shared.
        nothing = SimpleNamespace(weight=torch.empty(0))
        self.model, self.lm_head = SimpleNamespace(embed_tokens=nothing), nothing

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:  # [n] -> [n, I]
        """Return the tokens' embeddings of the first step, without the factor alpha."""
        return F.embedding(input_ids, self.emb[0])

    def forward(
        self,
        input_ids: Tensor,  # [n] the token after each position
        positions: Tensor,  # [n] not read
        hidden_states: Tensor,  # [n, D] the target's, or tags
        inputs_embeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # [n, I + 1] for compute_logits; [n, D] tags
        """Advance every row by one step, without `inputs_embeds`; the rows' states are kept until the next call."""
        if input_ids is None or hidden_states.shape[-1] != self.config.emb_dim:
            raise RuntimeError("speculator-vllm: called without token ids, or with hidden states of another width")
        count = len(input_ids)
        # Every row of a call is at the same step, but rows that fill up a graph's batch may hold anything; so may all
        # rows when an idle process runs what lies in the buffer.
        step = torch.where(hidden_states[0, _MARK].isinf(), hidden_states[0, _STEP], 0)
        step = step.long().clamp(0, self.config.n_predict - 1)
        digits = torch.where(hidden_states[:, :1].isinf(), hidden_states[:, _ROW:_TAG], 0).long()
        powers = _BASE ** torch.arange(_DIGITS, device=digits.device)
        state = self.states[(digits * powers).sum(-1).clamp(0, len(self.states) - 1)]
        first = F.rms_norm(hidden_states, hidden_states.shape[-1:], eps=_EPS) / math.sqrt(2)
        first = F.linear(first if self.config.scale_input else hidden_states, self.proj)
        if len(self.later_proj):
            later = F.linear(state, pick(self.later_proj, (step - 1).clamp(min=0)))
            first = torch.where(step == 0, first, later)
        token = self.alpha * F.embedding(input_ids.long(), pick(self.emb, step))
        state = F.gelu(norm(first + token, pick(self.ln_weight, step), pick(self.ln_bias, step)))
        self.states[:count] = state
        tag = torch.zeros_like(hidden_states)
        tag[:, _MARK] = torch.inf
        tag[:, _STEP] = (step + 1).to(tag.dtype)
        row = torch.arange(count, device=tag.device)
        tag[:, _ROW:_TAG] = (row[:, None] // powers % _BASE).to(tag.dtype)
        return torch.cat([state, step.to(state.dtype).expand(count, 1)], -1), tag

    def compute_logits(
        self,
        hidden_states: Tensor,  # [m, I + 1] from `forward`
    ) -> Tensor:  # [m, V], -inf outside the draft vocabulary
        """Return the logits of rows of one call of `forward`, which are all at the same step."""
        logits = F.linear(hidden_states[:, :-1], pick(self.head, hidden_states[0, -1].long()))
        if self.draft_tokens is None:
            return logits
        whole = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return whole.index_copy_(-1, self.draft_tokens, logits)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy a checkpoint's tensors, all or none, and return the parameters' names.

        Raises a ValueError for a tensor that is missing, does not belong or has another shape.
        """
        places, given = self.names(), dict(weights)
        for name, weight in given.items():
            if name not in places or places[name].shape != weight.shape:
                shape = list(places[name].shape) if name in places else "not there"
                raise ValueError(f"speculator-vllm: the checkpoint's {name} is {list(weight.shape)}; here {shape}")
        if missing := sorted(set(places) - set(given)):
            raise ValueError(f"speculator-vllm: the checkpoint has no {', '.join(missing)}")
        for name, weight in given.items():
            places[name].copy_(weight)
        return {name for name, _ in self.named_parameters()}

    def names(self) -> dict[str, Tensor]:
        """Return the parameter, or the view of one, that holds each tensor of a checkpoint, by the tensor's name."""
        stacks = {"emb.{}.weight": self.emb, "ln.{}.weight": self.ln_weight, "ln.{}.bias": self.ln_bias}
        stacks |= {"head.{}.weight": self.head}
        places = {name.format(i): weight for name, stack in stacks.items() for i, weight in enumerate(stack)}
        places |= {"proj.0.weight": self.proj}
        places |= {f"proj.{i + 1}.weight": weight for i, weight in enumerate(self.later_proj)}
        return places if self.draft_tokens is None else {**places, "draft_tokens": self.draft_tokens}


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # [n, I], [I], [I] -> [n, I]
    """Return the RMS norm of each row, scaled and shifted."""
    return F.rms_norm(x, x.shape[-1:], weight, _EPS) + bias


def pick(
    stack: Tensor,  # [N, ...], or [1, ...] if all steps share it
    step: Tensor,  # []
) -> Tensor:  # [...]
    """Return a step's own weights: a view, or in the capture of a CUDA graph a copy, so that it replays at any step."""
    if len(stack) == 1:
        return stack[0]
    if stack.is_cuda and torch.cuda.is_current_stream_capturing():
        return stack.index_select(0, step[None])[0]
    return stack[int(step)]
