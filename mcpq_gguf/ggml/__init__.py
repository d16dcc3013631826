"""GGML's side: block types, GGUF metadata values, and the kernels that make blocks from source codes."""
