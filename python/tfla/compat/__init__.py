"""What other packages call, on tfla's kernels.

tfla.compat.mlstm_kernels   register(): our kernels under new names in mlstm_kernels' registries
tfla.compat.transformers    patch(): the Hugging Face xLSTM, Qwen3-Next, Mamba-2 and relatives on our kernels
tfla.compat.fla             flash-linear-attention's functions with a scalar decay per head, and its delta rule
tfla.compat.mamba           mamba_ssm's functions for Mamba-2
tfla.compat.causal_conv1d   causal_conv1d_fn and causal_conv1d_update
"""
