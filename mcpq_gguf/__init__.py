"""mcpq-gguf: checkpoints quantized for vLLM, carried over to native GGUF files without a second quantization."""

__version__ = "0.1.0"
