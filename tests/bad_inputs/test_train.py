"""`train.py`: values, keys, config files, targets, sources and folders."""

from __future__ import annotations

from bad_inputs.cases import NOT_TEXT, Case, bad_files, bad_rows, flags, table

SMALL = "--eval.prompt_tokens 16 --eval.max_new_tokens 16 --stage2.generate.prompt_tokens 16"
SMALL += (
    " --stage1.max_steps 10 --stage1.warmup_steps 0 --stage1.eval_steps 10 --stage1.save_steps 10 --stage2.max_steps 0"
)
SMALL += " --stage2.generate.max_new_tokens 16 --data.seq_length 64 --report_to none --speculator.initialise random"
RUN = f"train --config PLAIN --target.name_or_path TARGET --data.sources [TEXT] --output_dir run {SMALL}"

VALUES = flags(
    RUN,
    {
        "--stage1.max_steps -1": "max_steps",
        "--stage1.learning_rate x": "learning_rate",
        "--stage1.learning_rate nan": "learning_rate",
        "--stage1.bf16 maybe": "bf16",
        "--eval.temperatures []": "temperatures",
        "--speculator.architecture nonsense": "architecture",
        "--speculator.n_predict 0": "n_predict",
        "--speculator.architecture lstm": "lstm is gone",
        "--speculator.n_predict 1": "tie_weights",
        "--speculator.options.tie_weights maybe": "expected bool",
        "--speculator.options.scale_input 1": "expected bool",
        "--speculator.architecture eagle3 --speculator.options.rms_norm_eps true": "expected float",
        "--speculator.architecture eagle3 --speculator.options.aux_layers 2": "expected list",
        "--speculator.architecture dspark --speculator.options.markov_rank 2.5": "expected int",
        "--loss.kl 0": "loss",
        "--data.seq_length 1000000": "seq_length",
    },
)
KEYS = flags(
    RUN,
    {
        "--stage1.max_step 1": "stage1.max_steps",
        "--data.source 1": "data.sources",
        "--stage1.max_steps": "max_steps",
    },
)
YAML = {
    **NOT_TEXT,
    "section that is a word": "stage1: quick\n",
    "Python object": "output_dir: !!python/object/apply:os.system ['touch hacked']\n",
    "unbalanced": "stage1: {max_steps: 5\n",
    "unknown key": "stage1:\n  max_stepss: 1\n",
}
CONFIGS = [
    Case(case.command, "", case.files) for case in bad_files(f"train --config run.yaml {RUN[6:]}", "run.yaml", YAML)
]
PLACES = [
    *flags(
        RUN,
        {
            "--target.name_or_path nowhere/at/all": "nowhere/at/all",
            "--speculator.warm_start nowhere": "nowhere",
            "--speculator.warm_start MLP --speculator.inner_dim 24": "inner_dim",
            "--data.sources [nowhere.jsonl]": "nowhere.jsonl",
            "--data.sources [TEXT@0]": "weight",
            "--output_dir TEXT": "text.jsonl",
        },
    ),
    Case(f"{RUN} --output_dir mine", "mine", {"mine/thesis.txt": "ten years"}),
    Case(f"{RUN} --output_dir mine --overwrite_output_dir", "mine", {"mine/thesis.txt": "ten years"}),
    Case(RUN, "config.yaml", {"run/config.yaml": "a: ["}),
    *bad_rows(f"{RUN} --data.sources", "[bad.jsonl]"),
]


@table(VALUES, KEYS, CONFIGS, PLACES)
def test_a_wrong_config_fails_in_one_line(case, fails_in_one_line):
    fails_in_one_line(case)
