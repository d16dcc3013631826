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
from .convert import OUTTYPES, Options, Prepared, convert, exactness, prepare
from .errors import McpqError
from .mmproj import TYPES as MMPROJ_TYPES

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
@click.option("--asym", type=click.Choice(["exact", "q8_0", "q4_1"]), default="exact", show_default=True,
              help="Integers with zero points: the smallest exact type, exact without Q5_0, or Q4_1 even if lossy.")
@click.option("--mmproj/--no-mmproj", default=True, show_default=True,
              help="Write the vision projector beside the model.")
@click.option("--mmproj-only", is_flag=True, help="Write nothing but the projector.")
@click.option("--mmproj-type", type=click.Choice(list(MMPROJ_TYPES), case_sensitive=False), default="bf16",
              show_default=True, help="Type of the projector's matrices.")
@click.option("--projector", help="clip.projector_type to write, e.g. minicpmv4_6 for llama.cpp builds before 11700.")
@click.option("--llama-build", type=click.IntRange(1), help="Oldest llama.cpp build that should load the projector.")
@click.option("--name", help="Model name for metadata and file name, instead of the one found.")
@click.option("--quantized-by", help="Who quantized the checkpoint (general.quantized_by).")
@click.option("--license", "license_", help="Licence (general.license), instead of the model card's.")
@click.option("--threads", type=click.IntRange(1), help="Worker threads; default: the number of processors.")
@click.option("--resume/--no-resume", default=True, show_default=True, help="Continue a run that was killed.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print machine-readable results.")
def convert_command(checkpoint: Path, out: Path, outtype: str, asym: str, mmproj: bool, mmproj_only: bool,
                    mmproj_type: str, projector: str | None, llama_build: int | None, name: str | None,
                    quantized_by: str | None, license_: str | None, threads: int | None, resume: bool, dry_run: bool,
                    as_json: bool) -> None:
    """Convert CHECKPOINT, a directory of safetensors with config.json, to GGUF."""
    if mmproj_only and not mmproj:
        raise click.UsageError("--mmproj-only and --no-mmproj exclude each other")
    overrides = {k: v for k, v in (("name", name), ("quantized_by", quantized_by), ("license", license_)) if v}
    prepared = prepare(checkpoint, Options(outtype, not mmproj_only, mmproj, mmproj_type, projector, llama_build, asym,
                                           overrides))
    _notes(prepared)
    if dry_run:
        _print_plan(prepared, as_json)
        return
    started = time.monotonic()
    with tqdm(total=prepared.nbytes, unit="B", unit_scale=True, disable=None, desc="convert", file=sys.stderr) as bar:
        files = convert(prepared, out, threads, bar.update, resume, _note)
    seconds = time.monotonic() - started
    results: list[dict[str, Any]] = [
        {"file": str(f.path), "bytes": f.nbytes, "sha256": f.sha256, "exactness": exactness(p.entries),
         "losses": {n: {"rms": x.rms, "max": x.maximum} for n, x in f.losses.items()}}
        for f, p in zip(files, prepared.plans)]
    if as_json:
        _print_json({"files": results, "seconds": round(seconds, 3), "notes": list(prepared.notes)})
        return
    for file, result in zip(files, results):
        click.echo(f"{file.path}  {file.nbytes:,} bytes  sha256 {file.sha256}")
        click.echo("  weights: " + ", ".join(f"{n} {kind}" for kind, n in result["exactness"].items()))
        worst = sorted(file.losses.items(), key=lambda item: -item[1].rms)[:3]
        for tensor_name, loss in worst:
            click.echo(f"  lossy: {tensor_name}, {loss}{', the worst three' if len(file.losses) > 3 else ''}")
    click.echo(f"{prepared.nbytes:,} bytes in {seconds:.1f} s")


@cli.command("inspect")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--outtype", type=click.Choice(OUTTYPES, case_sensitive=False), default="native", show_default=True)
@click.option("--tensors", is_flag=True, help="List every output tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print machine-readable results.")
def inspect_command(checkpoint: Path, outtype: str, tensors: bool, as_json: bool) -> None:
    """Show what CHECKPOINT holds, what each part would become, and how exactly."""
    prepared = prepare(checkpoint, Options(outtype))
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
    if tensors:
        _tensor_table(data["tensors"])
    for file in data["files"]:
        click.echo(f"output: {file['file']}, {file['bytes']:,} bytes, {file['tensors']:,} tensors")
    _notes(prepared)


def main() -> NoReturn:
    """Entry point: one clear line for an error, a traceback only with --debug."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = cli.main(standalone_mode=False, prog_name="mcpq-gguf")
        sys.exit(code if isinstance(code, int) else 0)
    except (click.exceptions.Abort, KeyboardInterrupt):
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
    if as_json:
        _print_json({"files": [{"file": p.name, "bytes": p.nbytes, "exactness": exactness(p.entries),
                                "tensors": [tensor(e) for e in p.entries]} for p in prepared.plans],
                     "notes": list(prepared.notes)})
        return
    for plan in prepared.plans:
        _tensor_table([tensor(e) for e in plan.entries])
        click.echo(f"{plan.name}: {plan.nbytes:,} bytes, {len(plan.entries):,} tensors\n")
    click.echo("nothing was written")


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
