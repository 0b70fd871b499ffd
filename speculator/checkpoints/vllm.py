"""Targets for which vLLM can't run a draft head that reads auxiliary hidden states.

The list is from vLLM 0.32: the registry has a class for these model types, and the class has no `SupportsEagle3`. Types
that the registry lacks run through transformers' own code, which has the interface.
"""

from __future__ import annotations

from speculator.checkpoints.layout import base_config

NAME = "vLLM 0.32"
WITHOUT_AUX_STATES = """
aria audioflamingo3 axk1 blip-2 bloom cohere cohere2 cohere2_vision cosmos3_edge dbrx diffusion_gemma dots3_note
dots3_note_text ernie4_5_moe ernie4_5_vl_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba gemma gemma2 gemma3
gemma3_text gemma3n gemma3n_text glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_ocr glmasr gpt-sw3 gpt2 gptj
granite4_vision granite_speech granite_speech_plus granitemoe granitemoe_swa granitemoehybrid granitemoeshared
hrm_text hy_v3 hy_v4 hyperclovax idefics3 inkling_mm_model inkling_text internvl jamba lfm2 lfm2_moe lfm2_vl
llava_next llava_next_video llava_onevision longcat_flash mamba mamba2 mixtral molmo2 moss_transcribe_diarize
nemotron olmo_hybrid olmoe opt paddleocr_vl paligemma phimoe qianfan_ocr qwen2_5_omni qwen2_audio qwen2_moe qwen2_vl
qwen4_exp_text shieldgemma2 smolvlm stablelm step3p7 voxtral zamba2
"""
"""Their model types in transformers."""


def refusal(base: str | None) -> str | None:
    """Return the reason that vLLM can't run such a head for this target; None if it can or the target isn't found."""
    config = base_config(base)
    if config is None or config.model_type not in WITHOUT_AUX_STATES.split():
        return None
    return f"gives a head no hidden states of {config.model_type} models: stops at start (no EAGLE3 interface)"
