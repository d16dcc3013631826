"""The command line: arguments in, printing out. Everything else is a function of the package.

Results go to stdout, progress and notes to stderr. Exit codes: 0 good, 1 a conversion or a check failed, 2 wrong use.
"""

import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
from tqdm import tqdm

from . import __version__
from .census import report, tensor
from .convert import OUTTYPES, Prepared, convert, exactness, prepare
from .errors import McpqError

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="mcpq-gguf")
@click.option("--debug", is_flag=True, help="Show a traceback with an error.")
def cli(debug: bool) -> None:
    """Carry checkpoints quantized for vLLM over to native GGUF files for llama.cpp, without quantizing again."""


@cli.command("convert")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("-o", "--out", "--outfile", type=click.Path(path_type=Path), default=Path("."), show_default=True,
              help="Directory, or a file name that ends in .gguf.")
@click.option("--outtype", type=click.Choice(OUTTYPES, case_sensitive=False), default="native", show_default=True,
              help="native carries codes and scales over; the others decode them.")
@click.option("--name", help="Model name for metadata and file name, instead of the one found.")
@click.option("--quantized-by", help="Who quantized the checkpoint (general.quantized_by).")
@click.option("--license", "license_", help="Licence (general.license), instead of the model card's.")
@click.option("--threads", type=click.IntRange(1), help="Worker threads; default: the number of processors.")
@click.option("--resume/--no-resume", default=True, show_default=True, help="Continue a run that was killed.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print machine-readable results.")
def convert_command(checkpoint: Path, out: Path, outtype: str, name: str | None, quantized_by: str | None,
                    license_: str | None, threads: int | None, resume: bool, dry_run: bool, as_json: bool) -> None:
    """Convert CHECKPOINT, a directory of safetensors with config.json, to a GGUF file."""
    overrides = {k: v for k, v in (("name", name), ("quantized_by", quantized_by), ("license", license_)) if v}
    prepared = prepare(checkpoint, outtype, overrides)
    _notes(prepared)
    if dry_run:
        _print_plan(prepared, as_json)
        return
    started = time.monotonic()
    with tqdm(total=prepared.plan.nbytes, unit="B", unit_scale=True, disable=None,
              desc=prepared.plan.name, file=sys.stderr) as bar:
        written = convert(prepared, out, threads, bar.update, resume, _note)
    seconds = time.monotonic() - started
    counts = exactness(prepared.plan.entries)
    if as_json:
        _print_json({"file": str(written.path), "bytes": written.nbytes, "sha256": written.sha256,
                     "seconds": round(seconds, 3), "exactness": counts, "notes": list(prepared.notes)})
    else:
        click.echo(f"{written.path}  {written.nbytes:,} bytes in {seconds:.1f} s  sha256 {written.sha256}")
        click.echo("weights: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))


@cli.command("inspect")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--outtype", type=click.Choice(OUTTYPES, case_sensitive=False), default="native", show_default=True)
@click.option("--tensors", is_flag=True, help="List every output tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print machine-readable results.")
def inspect_command(checkpoint: Path, outtype: str, tensors: bool, as_json: bool) -> None:
    """Show what CHECKPOINT holds, what each part would become, and how exactly. Reads headers only."""
    prepared = prepare(checkpoint, outtype)
    data = report(prepared, tensors)
    if as_json:
        _print_json(data)
        return
    click.echo(f"{data['checkpoint']}: {data['architecture']} ({data['gguf_architecture']}), "
               f"{data['source_tensors']:,} tensors in {len(data['shards'])} shard(s), {_size(data['source_bytes'])}")
    click.echo("tensors by dtype: " + ", ".join(f"{n:,} {d}" for d, n in data["source_dtypes"].items()))
    _table(["format", "scheme", "activations", "modules", "bytes", "becomes", "exactness", "why", "roles"],
           [[r["format"], r["scheme"], r["activations"] or "-", f"{r['modules']:,}", _size(r["nbytes"]), r["target"],
             r["exactness"], r["why"] or "-", r["roles"]] for r in data["census"]])
    for left in data["left_out"]:
        click.echo(f"left out: {left['modules']} modules, {left['reason']}")
    if tensors:
        _tensor_table(data["tensors"])
    click.echo(f"output: {data['file']}, {data['file_bytes']:,} bytes, {data['tensors_written']:,} tensors")
    _notes(prepared)


def main() -> NoReturn:
    """Entry point: one clear line for an error, a traceback only with --debug."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = cli.main(standalone_mode=False, prog_name="mcpq-gguf")
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        click.echo("interrupted: no file was finished; run the same command again to continue", err=True)
        sys.exit(130)
    except click.ClickException as e:
        e.show()
        sys.exit(2)
    except McpqError as e:
        if "--debug" in sys.argv:
            raise
        click.echo(f"error: {e}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _print_plan(prepared: Prepared, as_json: bool) -> None:
    plan = prepared.plan
    if as_json:
        _print_json({"file": plan.name, "bytes": plan.nbytes, "exactness": exactness(plan.entries),
                     "tensors": [tensor(e) for e in plan.entries], "notes": list(prepared.notes)})
        return
    _tensor_table([tensor(e) for e in plan.entries])
    click.echo(f"{plan.name}: {plan.nbytes:,} bytes, {len(plan.entries):,} tensors; nothing was written")


def _tensor_table(tensors: list[dict[str, Any]]) -> None:
    _table(["tensor", "type", "shape", "bytes", "offset", "exactness", "sources", "first source"],
           [[t["name"], t["type"], "x".join(map(str, t["shape"])), f"{t['bytes']:,}", f"{t['offset']:,}",
             t["exactness"] + (f" ({t['why']})" if t["why"] else ""), str(t["sources"]), t["first_source"]]
            for t in tensors])


def _table(head: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        click.echo("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip())


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def _notes(prepared: Prepared) -> None:
    for note in prepared.notes:
        _note(note)


def _note(text: str) -> None:
    tqdm.write(f"note: {text}", file=sys.stderr)


def _print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=1, ensure_ascii=False))
