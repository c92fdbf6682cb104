"""MaxText's default rules, for the axis names that the dense and the MoE decoder have.

Source: AI-Hypercomputer/maxtext, src/maxtext/configs/base.yml, `logical_axis_rules`, in the version
of commit 000b810bb1d98e8c0b0d55fc43fb3979fd35db15 (2026; looked up in November 2026). The names on
parameters and activations are those of its layers (llama2.py, attentions.py, linears.py, moe.py).

Kept are the mesh axes data, fsdp, tensor and expert. The others (stage, fsdp_transpose, context,
tensor_sequence, autoregressive and so on) have size one unless a user asks for them, as do tensor
and expert: by default all devices of a slice are fsdp (`ici_fsdp_parallelism: -1`), and
`remat_policy` is full.

MaxText's default experts are a dropless kernel (`sparse_matmul: true`) inside a manual region; with
`sparse_matmul: false` and a capacity factor, its routing is the einsums of `models.moe`, to which
these rules apply. There `moe_dispatch_no_expert_sharding` chooses between the two tables: true lets
the expert mesh axis divide the experts (tokens travel), false, the default, leaves it on the batch
(expert weights are gathered).
"""

from experiments.handwritten.layouts import Table

PARAMS: Table = {
    # Vocabulary
    "vocab": ("tensor",),
    "embed_vocab": ("fsdp", "expert"),
    # Attention
    "heads": ("tensor",),  # and q_heads
    "kv_heads": ("tensor",),
    # Experts
    "exp": ("expert",),
    "mlp_moe": ("tensor",),
    "embed_moe": ("fsdp",),
    # Dense layers
    "mlp": ("tensor",),
    "embed": ("fsdp", "expert"),
    "norm": ("tensor",),
}

ACTIVATIONS: Table = {
    "batch": ("data", "fsdp", "expert"),  # activation_batch, and _attn, _moe, _embed_and_logits_
    "heads": ("tensor",),  # activation_heads
    "kv_heads": ("tensor",),  # activation_kv_heads
    "mlp": ("tensor",),  # activation_mlp, activation_mlp_moe
    "embed": ("tensor",),  # activation_embed, activation_embed_moe
    "vocab": ("tensor",),  # activation_vocab
    "expert": ("expert",),  # activation_exp
    "expert_batch": ("data", "fsdp"),  # activation_batch_moe without its expert axis
}

# activation_batch_moe stands before activation_exp in the list of rules, and a mesh axis is given
# to the first rule that asks for it.
ACTIVATIONS_BY_BATCH: Table = {**ACTIVATIONS, "expert": (), "expert_batch": ACTIVATIONS["batch"]}
