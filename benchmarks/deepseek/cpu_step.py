"""CPU seconds of a training step of `deepseek-tiny`: ours, and the same model in transformers and PyTorch eager.

    .venv/bin/python benchmarks/deepseek/cpu_step.py forebay
    PYTHON_WITH_TORCH benchmarks/deepseek/cpu_step.py transformers

16 sequences of 128 tokens, float32, forward, backward and AdamW; without the multi-token-prediction layer, which transformers
does not have. Seconds are of the process on all cores, so that other work on the machine counts little; the median of ten
steps after three.
"""

import sys
import time

BATCH, SEQ, WARM, STEPS = 16, 128, 3, 10


def forebay():
    import jax
    import numpy as np

    from forebay.train.config import ProgramConfig
    from forebay.train.program import make_program

    config = ProgramConfig(
        model="deepseek-tiny", sizes={"mtp": False}, batch=BATCH, seq=SEQ, dtype="float32", placement="none"
    )
    program = make_program(config, jax.devices()[:1])
    state = program.init(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(256, size=(BATCH, SEQ + 1)).astype(np.int32)
    batch = {"inputs": jax.numpy.asarray(tokens[:, :-1]), "targets": jax.numpy.asarray(tokens[:, 1:])}
    step = program.jit_step()

    def run():
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics["loss"])

    return run


def transformers():
    import torch  # pyright: ignore[reportMissingImports]
    import transformers as hf  # pyright: ignore[reportMissingImports]

    from_ours = {
        "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "first_k_dense_replace": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "intermediate_size": 384,
        "moe_intermediate_size": 64, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
        "n_shared_experts": 1, "routed_scaling_factor": 2.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }  # fmt: skip
    model = hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**from_ours, attn_implementation="eager")).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(256, (BATCH, SEQ))

    def run():
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    return run


def main() -> None:
    run = {"forebay": forebay, "transformers": transformers}[sys.argv[1]]()
    for _ in range(WARM):
        run()
    spent = []
    for _ in range(STEPS):
        start, wall = time.process_time(), time.perf_counter()
        run()
        spent.append((time.process_time() - start, time.perf_counter() - wall))
    cpu, wall = (sorted(s)[STEPS // 2] for s in zip(*spent, strict=True))
    print(f"{sys.argv[1]}: {cpu:.3f} CPU s a step, {wall:.3f} s elapsed")


if __name__ == "__main__":
    main()
