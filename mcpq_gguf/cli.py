"""The command line: arguments in, printing out. Everything else is a function of the package.

Results go to stdout, progress and notes to stderr. Exit codes: 0 good, 1 a conversion or a check failed, 2 wrong use.
"""

import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
from tqdm import tqdm

from . import __version__
from .census import report
from .convert import OUTTYPES, Options, Prepared, convert, exactness, prepare
from .errors import McpqError, PlanError
from .fit import KV_TYPES, MemorySum, best, memory, parse_size
from .imatrix import run_imatrix
from .manifest import tensor
from .mmproj import TYPES as MMPROJ_TYPES
from .plan import FilePlan
from .tiers import llama_quantize_command, load_tiers
from .writer import Finished

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
@click.option("--tiers", help="The ladder instead of --outtype: all, names with commas between, or a .toml file.")
@click.option("--imatrix", type=click.Path(path_type=Path), help="Importance matrix (GGUF or .dat).")
@click.option("--fit", metavar="SIZE", help="Write only the best tier that fits a card of this memory, e.g. 16GiB.")
@click.option("--gpus", type=click.IntRange(1), default=1, show_default=True, help="Cards of that size.")
@click.option("--ctx", type=click.IntRange(1), default=32768, show_default=True, help="Context length for --fit.")
@click.option("--kv", type=click.Choice(list(KV_TYPES)), default="f16", show_default=True, help="KV cache for --fit.")
@click.option("--shard-size", metavar="SIZE", help="Split files with more tensor data than this, e.g. 20GB.")
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
@click.option("--stdout-names", is_flag=True, help="Print nothing but the names of the files.")
@click.option("--json", "as_json", is_flag=True, help="Print machine-readable results.")
def convert_command(checkpoint: Path, out: Path, outtype: str, tiers: str | None, imatrix: Path | None, fit: str | None,
                    gpus: int, ctx: int, kv: str, shard_size: str | None, asym: str, mmproj: bool, mmproj_only: bool,
                    mmproj_type: str, projector: str | None, llama_build: int | None, name: str | None,
                    quantized_by: str | None, license_: str | None, threads: int | None, resume: bool, dry_run: bool,
                    stdout_names: bool, as_json: bool) -> None:
    """Convert CHECKPOINT, a directory of safetensors with config.json, to GGUF."""
    if mmproj_only and not mmproj:
        raise click.UsageError("--mmproj-only and --no-mmproj exclude each other")
    overrides = {k: v for k, v in (("name", name), ("quantized_by", quantized_by), ("license", license_)) if v}
    options = Options(outtype, tiers, imatrix, parse_size(shard_size) if shard_size else None, not mmproj_only, mmproj,
                      mmproj_type, projector, llama_build, asym, overrides)
    if fit:
        ladder = replace(options, tiers=tiers or "all", shard_size=None)
        options = replace(options, tiers=_fitting(prepare(checkpoint, ladder), fit, gpus, ctx, kv))
    prepared = prepare(checkpoint, options)
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
    if stdout_names:
        click.echo("\n".join(str(f.path) for f in files))
    elif as_json:
        _print_json({"files": results, "seconds": round(seconds, 3), "notes": list(prepared.notes)})
    else:
        _print_results(prepared, files, results, seconds)


def _print_results(prepared: Prepared, files: list[Finished], results: list[dict[str, Any]], seconds: float) -> None:
    for file, result in zip(files, results):
        click.echo(f"{file.path}  {file.nbytes:,} bytes  sha256 {file.sha256}")
        click.echo("  weights: " + ", ".join(f"{n} {kind}" for kind, n in result["exactness"].items()))
        worst = sorted(file.losses.items(), key=lambda item: -item[1].rms)[:3]
        for tensor_name, loss in worst:
            click.echo(f"  lossy: {tensor_name}, {loss}{', the worst three' if len(file.losses) > 3 else ''}")
    click.echo(f"{prepared.nbytes:,} bytes in {seconds:.1f} s")


@cli.command("tiers")
@click.argument("checkpoint", type=click.Path(path_type=Path), required=False)
@click.option("--tiers", "spec", default="all", show_default=True, help="Names with commas between, or a .toml file.")
@click.option("--ctx", type=click.IntRange(1), default=32768, show_default=True, help="Context length for the memory.")
@click.option("--kv", type=click.Choice(list(KV_TYPES)), default="f16", show_default=True, help="KV cache type.")
@click.option("--json", "as_json", is_flag=True, help="Print machine-readable results.")
def tiers_command(checkpoint: Path | None, spec: str, ctx: int, kv: str, as_json: bool) -> None:
    """List the tiers, for CHECKPOINT with file names, sizes and the memory they take."""
    rows: list[dict[str, Any]] = [{"tier": t.name, "description": t.description} for t in load_tiers(spec)]
    if checkpoint is not None:
        prepared = prepare(checkpoint, Options(tiers=spec))
        files = {tier: (plan, need) for tier, plan, need in _sums(prepared, 1, ctx, kv)}
        rows = [row | {"file": plan.name, "bytes": plan.nbytes, "memory": need.total}
                for row in rows if row["tier"] in files for plan, need in [files[row["tier"]]]]
        _notes(prepared)
    if as_json:
        _print_json(rows)
        return
    head = sorted(rows[0], key=lambda key: key == "description")  # the longest last
    _table(head, [[f"{row[k]:,}" if isinstance(row[k], int) else row[k] for k in head] for row in rows])


@cli.command("imatrix")
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.option("-f", "--file", "text", type=click.Path(path_type=Path, exists=True), required=True,
              help="Calibration text.")
@click.option("-o", "--out", type=click.Path(path_type=Path), default=Path("imatrix.gguf"), show_default=True)
@click.option("--chunks", type=click.IntRange(1), help="Chunks of the text to use; default: all.")
@click.option("--llama-bin", type=click.Path(path_type=Path), help="Folder of llama.cpp's programs.")
@click.option("--ctx", type=click.IntRange(1), default=512, show_default=True, help="Tokens in a chunk.")
@click.option("--threads", type=click.IntRange(1), help="Threads for llama-imatrix.")
@click.option("-ngl", "--gpu-layers", type=click.IntRange(0), help="Layers on the GPU.")
def imatrix_command(model: Path, text: Path, out: Path, chunks: int | None, llama_bin: Path | None, ctx: int,
                    threads: int | None, gpu_layers: int | None) -> None:
    """Run llama-imatrix over a text with MODEL, a tier's GGUF file."""
    imatrix = run_imatrix(model, text, out, llama_bin, chunks=chunks, context=ctx, threads=threads,
                          gpu_layers=gpu_layers)
    click.echo(f"{out}: importance of {len(imatrix.values)} tensors from {imatrix.chunks} chunks")
    if imatrix.unused:
        click.echo(f"the text never reached {len(imatrix.unused)} experts, the first is {imatrix.unused[0][1]} of "
                   f"{imatrix.unused[0][0]}; their columns count alike")


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


def _sums(prepared: Prepared, gpus: int, ctx: int, kv: str) -> list[tuple[str, FilePlan, MemorySum]]:
    """(tier, its file's plan, memory) of each tier of an unsharded plan."""
    projector = sum(p.nbytes for p, t in zip(prepared.plans, prepared.tiers) if t == "mmproj")
    return [(tier, plan, memory(plan, ctx, kv, gpus, projector))
            for plan, tier in zip(prepared.plans, prepared.tiers) if tier != "mmproj"]


def _fitting(prepared: Prepared, size: str, gpus: int, ctx: int, kv: str) -> str:
    """The first tier of the ladder that fits; prints the sum of each."""
    limit = parse_size(size)
    sums = _sums(prepared, gpus, ctx, kv)
    chosen = best([need for _, _, need in sums], limit)
    for i, (tier, plan, need) in enumerate(sums):
        verdict = "taken" if i == chosen else "fits" if need.fits(limit) else "does not fit"
        click.echo(f"{tier} ({plan.name}): {verdict}\n{need}\n", err=True)
    if chosen is None:
        raise PlanError(f"no tier fits {gpus} x {size} with {ctx:,} tokens of context; use a smaller --ctx, --kv q8_0, "
                        "or keep experts in system memory (llama-server --n-cpu-moe)")
    return sums[chosen][0]


def _terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _print_plan(prepared: Prepared, as_json: bool) -> None:
    if as_json:
        _print_json({"files": [{"file": p.name, "bytes": p.nbytes, "exactness": exactness(p.entries),
                                "llama_quantize": llama_quantize_command(p),
                                "tensors": [tensor(e) for e in p.entries]} for p in prepared.plans],
                     "notes": list(prepared.notes)})
        return
    for plan in prepared.plans:
        _tensor_table([tensor(e) for e in plan.entries])
        click.echo(f"{plan.name}: {plan.nbytes:,} bytes, {len(plan.entries):,} tensors")
        if command := llama_quantize_command(plan):
            click.echo(f"nearest with llama.cpp, from a BF16 file: {command}")
        click.echo()
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
