"""The errors a user can meet. Each message says what was found, where, what was expected and what to do."""


class McpqError(Exception):
    """Base of every error that mcpq-gguf raises on purpose; the CLI prints its message as one line."""


class CheckpointError(McpqError):
    """A checkpoint's files are missing, damaged or contradict each other."""


class SchemeError(McpqError):
    """`quantization_config` is malformed, or contradicts the tensors that are there."""


class UnsupportedFormat(McpqError):
    """A storage format, scheme or value that mcpq-gguf does not carry."""


class UnsupportedArchitecture(McpqError):
    """A model architecture, or a setting of one, that has no table."""


class PlanError(McpqError):
    """The tensors do not add up to the model that config.json describes, or the output cannot be laid out."""


class WriteError(McpqError):
    """Writing an output file failed; no file with the final name was left behind."""


class EngineError(McpqError):
    """A llama.cpp binary is missing, failed, or did not answer."""


class VerifyError(McpqError):
    """A written file is not what it claims to be."""
