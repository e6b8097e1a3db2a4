"""`radixgrove compile-kernels`: FlashInfer's prefill, before a worker asks for it."""

from __future__ import annotations

import sys

import click

from radixgrove.service import exit_codes
from radixgrove.worker.attention.flashinfer_kernels import (
    ARCHITECTURES,
    DTYPES,
    HEAD_DIMS,
    TOOLKIT_WHEELS,
    compile_kernels,
    find_toolkit,
    is_installed,
    kernels_for,
)


@click.command(
    help="Compile FlashInfer's prefill kernels and put them beside its package, where workers "
    "find them. Needs no GPU; the compiler is the nvcc of CUDA_HOME, the path or /usr/local/cuda."
)
@click.option(
    "--architecture",
    "architectures",
    multiple=True,
    default=ARCHITECTURES,
    show_default=True,
    help="Of GPUs that will run them: 8.0, 8.6, 8.9, 9.0a (Hopper), 10.0a, 12.0f. May be repeated.",
)
@click.option(
    "--head-dim",
    "head_dims",
    type=click.Choice([str(dim) for dim in HEAD_DIMS]),
    multiple=True,
    default=[str(dim) for dim in HEAD_DIMS],
    show_default=True,
    help="Of models. May be repeated.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(list(DTYPES)),
    multiple=True,
    default=["bfloat16"],
    show_default=True,
    help="Of models. May be repeated.",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Compilers at once, about 2 GB each; all cores."
)
def compile_kernels_command(
    architectures: tuple[str, ...],
    head_dims: tuple[str, ...],
    dtypes: tuple[str, ...],
    jobs: int | None,
) -> int:
    if not is_installed():
        raise click.ClickException("FlashInfer is not installed: pip install 'radixgrove[cuda]'")
    toolkit = find_toolkit()
    if toolkit is None:
        raise click.ClickException(
            f"no nvcc: pip install --target DIR '{TOOLKIT_WHEELS}', then set "
            "CUDA_HOME=DIR/nvidia/cu13"
        )
    try:
        kernels = kernels_for(architectures, dtypes, [int(dim) for dim in head_dims])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--architecture") from error
    for kernel in kernels:
        click.echo(f"to compile with {toolkit.home}: {kernel}")
    try:
        paths = compile_kernels(kernels, architectures, toolkit, jobs, _show)
    except (RuntimeError, OSError) as error:
        raise click.ClickException(f"no kernel was compiled: {error}") from error
    for path in paths:
        click.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return exit_codes.OK


def _show(progress: str) -> None:
    """On one line of a terminal; a build's log gets none of it."""
    if sys.stderr.isatty():
        click.echo(f"\r{progress}", nl=False, err=True)
