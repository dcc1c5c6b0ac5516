"""The command line: what each command takes, and the exit code each kind of failure ends with.

Commands import what they need when they run: help and a config's errors come without waiting for JAX.
"""

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import __version__
from longtrain.errors import ConfigError, LongtrainError, Preempted, Problem
from longtrain.hardware import DEVICES

if TYPE_CHECKING:
    from longtrain.config import Config

EXIT_CODES = """exit codes:
  0 done · 1 a check failed · 2 config refused · 3 data missing, corrupt or exhausted · 4 non-finite loss or gradients
  5 checkpoint cannot be written or read · 6 a peer died or the cluster cannot start
  75 preempted and saved: run the same command again"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the process's exit code."""
    parsed = _parse(arguments)
    exit_code = _outcome(parsed)
    if exit_code not in (0, Preempted.exit_code):
        from longtrain.parallel.process import leave_cluster

        leave_cluster(exit_code)
    return exit_code


def _outcome(parsed: argparse.Namespace) -> int:
    """Runs the command and says how it failed, if it did; the exit code."""
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except LongtrainError as error:
        print(f"longtrain: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as stopped:
        # A signal before the first step. Threads of what it cut short crash in Python's own way out (seen: exit 139).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(stopped.code if isinstance(stopped.code, int) else 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader (head, less) went away: nobody to tell, and nothing more to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception:  # none of ours, so a mistake of ours: all of it is shown
        traceback.print_exc()
        return 1
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed arguments; overrides may stand between options, which argparse alone does not allow."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    if rest and (any(text.startswith("-") or "=" not in text for text in rest) or not hasattr(parsed, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    parsed.words = list(sys.argv[1:] if arguments is None else arguments)
    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longtrain",
        description="Trains language models on very long documents.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"longtrain {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    _config_command(commands, "train", _train, "train; the same command again resumes")
    planned = _config_command(commands, "plan", _plan, "say whether it fits and how long a step takes")
    planned.add_argument("--hardware", metavar="KIND", help=f"required: the kind of device, {', '.join(DEVICES)}")
    planned.add_argument("--devices", type=_positive, metavar="N", help="how many (default: the mesh's product)")
    planned.add_argument(
        "--document-tokens", type=_positive, metavar="N", help="length of the documents in a row (default: the row's)"
    )
    planned.add_argument("--search", action="store_true", help="also rank the meshes of as many devices")
    planned.add_argument("--max-sequence", action="store_true", help="also find the longest row that fits")
    planned.add_argument("--assumptions", type=Path, metavar="FILE", help="YAML of entries in place of those printed")
    planned.add_argument(
        "--compile",
        action="store_true",
        help="compile the train step for the hardware, which need not be there, and read the program",
    )
    planned.add_argument(
        "--compiler",
        choices=("device", "cpu"),
        default="device",
        help="with --compile: the hardware's own (default), or the CPU's for an estimate of the memory alone",
    )
    planned.add_argument("--strict", action="store_true", help="with --compile: findings of the lint are a failure")
    planned.add_argument(
        "--timeline", type=_new_file, metavar="FILE", help="with --compile: draw a step in time, as SVG"
    )
    _json_option(planned)
    doctor = _config_command(commands, "doctor", _doctor, "check a shrunk config against plainer runs of it")
    _json_option(doctor)
    evaluate = _config_command(commands, "eval", _evaluate, "loss of a run's checkpoint on the held-out documents")
    _step_option(evaluate, "evaluate the checkpoint of this step (default: the newest)")
    _json_option(evaluate)
    sample = _config_command(commands, "generate", _generate, "text from a run's checkpoint")
    sample.add_argument("--prompt", required=True, help="the text to go on from")
    sample.add_argument("--tokens", type=_positive, default=64, help="most tokens to add (default: 64)")
    sample.add_argument("--temperature", type=_not_negative, default=0.0, help="0: always the likeliest (default)")
    sample.add_argument("--top-p", type=_probability, default=1.0, help="draw from the likeliest with this mass")
    sample.add_argument("--seed", type=int, default=0, help="seed of the draws")
    _step_option(sample, "use the checkpoint of this step (default: the newest)")

    data = commands.add_parser("data", help="prepare and look at training data")
    data_commands = data.add_subparsers(title="commands", metavar="COMMAND", required=True)
    preparing = _config_command(data_commands, "prepare", _data_prepare, "tokenize the sources once")
    preparing.add_argument("--verify", action="store_true", help="check all that is prepared against its checksums")
    inspect = _config_command(data_commands, "inspect", _data_inspect, "show the rows of a step")
    _step_option(inspect, "the step (default: 1)")
    inspect.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the rows and the lengths of all documents (.png, .svg, .pdf)"
    )
    _json_option(inspect)

    kept = commands.add_parser("checkpoints", help="what a run has saved, and whether it is whole")
    kept.description = "Lists a run's checkpoints; reads, deletes or compares them."
    kept.add_argument("run_dir", metavar="RUN", type=Path, help="the run's folder")
    kept.add_argument("--verify", action="store_true", help="read all of it and compare with the digests")
    kept.add_argument("--delete", metavar="RULE", help="keep=N, keep=N,every=M, or leftovers (what is no checkpoint)")
    kept.add_argument("--diff", nargs=2, metavar=("A", "B"), help="how far weights are apart; STEP or RUN:STEP")
    _json_option(kept)
    kept.set_defaults(run=_checkpoints)

    convert = commands.add_parser("convert", help="weights in and out of Hugging Face folders")
    ways = convert.add_subparsers(title="commands", metavar="COMMAND", required=True)
    into = ways.add_parser("from-hf", help="a Llama folder to a run folder that training starts from")
    into.description = "Makes a run folder of a Hugging Face Llama folder, for checkpoint.init_from."
    into.add_argument("source", metavar="DIR", type=Path, help="config.json, safetensors files, tokenizer files")
    into.add_argument("--to", metavar="DIR", type=Path, required=True, help="the run folder to make")
    into.add_argument("--vocab-size", metavar="N", type=_positive, help="pad embedding and head with zeros to N rows")
    into.set_defaults(run=_convert_from_hf)
    out = ways.add_parser("to-hf", help="a run's checkpoint to a folder that transformers loads")
    out.description = "Makes a Hugging Face Llama folder of a run's checkpoint."
    out.add_argument("source", metavar="RUN", type=Path, help="the run's folder")
    out.add_argument("--to", metavar="DIR", type=Path, required=True, help="the folder to make")
    out.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: the run's model.param_dtype")
    out.add_argument("--vocab-size", metavar="N", type=_positive, help="keep N rows of a padded embedding and head")
    out.add_argument("--step", type=_step, metavar="N", help="the checkpoint of this step (default: the newest)")
    out.set_defaults(run=_convert_to_hf)

    bench = commands.add_parser("bench", help="time what the cluster can do")
    bench_commands = bench.add_subparsers(title="commands", metavar="COMMAND", required=True)
    collectives = bench_commands.add_parser(
        "collectives",
        help="time train steps on one backend of collectives against another",
        description="Times the train step of each CONFIG on each backend, with random tokens in rows of one document. "
        "On a cluster every process runs the same command. The reference table: configs/benchmarks/*.yaml.",
    )
    collectives.add_argument("configs", metavar="CONFIG", nargs="+", help="YAML files, and KEY=VALUE overrides for all")
    collectives.add_argument(
        "--backends", type=_backends, default=None, metavar="A,B", help="default: nccl,nvshmem,nccl_symmetric"
    )
    collectives.add_argument("--warmup", type=_positive, default=3, metavar="N", help="steps that do not count (3)")
    collectives.add_argument("--steps", type=_positive, default=10, metavar="N", help="steps timed each time (10)")
    collectives.add_argument("--repeats", type=_positive, default=3, metavar="N", help="times, backends in turn (3)")
    collectives.add_argument("--dry-run", action="store_true", help="compile for --hardware instead; no device needed")
    collectives.add_argument("--hardware", metavar="KIND", help=f"with --dry-run: one of {', '.join(DEVICES)}")
    _json_option(collectives)
    collectives.set_defaults(run=_bench_collectives, overrides=[])

    show = commands.add_parser("config", help="the resolved config as YAML")
    show.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML file")
    show.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="dotted overrides, e.g. mesh.context=4")
    show.add_argument("--origins", action="store_true", help="say for each value what set it")
    show.add_argument(
        "--schema", action="store_true", help="the JSON schema of a resolved config instead: no extends, sizes required"
    )
    show.set_defaults(run=_config_show, parser=show)
    return parser


def _config_command(commands: Any, name: str, run: Callable[..., None], help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="dotted overrides, e.g. mesh.context=4")
    parser.set_defaults(run=run)
    return parser


def _backends(text: str) -> list[str]:
    from typing import get_args

    from longtrain.config.schema import Backend

    asked, legal = text.split(","), get_args(Backend)
    if unknown := [name for name in asked if name not in legal]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: legal are {', '.join(legal)}")
    return asked


def _step_option(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--step", type=_positive, metavar="N", help=help)


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the result to FILE as JSON as well")


def _new_file(text: str) -> Path:
    """A path that can be written to: tried before any work, whose result would be lost."""
    path = Path(text)
    try:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text} is no file in a folder that exists")
        is_new = not path.exists()
        if is_new or path.is_file():  # else a pipe or a device, which opening would change
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        if is_new:
            path.unlink(missing_ok=True)  # other processes of a run try the same
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror or error}") from None
    return path


def _number(kind: type[int] | type[float], legal: str, holds: Callable[[float], bool]) -> Callable[[str], Any]:
    """What an option takes: numbers of a kind for which something holds."""

    def read(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not holds(value):
            raise argparse.ArgumentTypeError(f"{text} is not {legal}")
        return value

    return read


_positive = _number(int, "a whole number of at least 1", lambda value: value >= 1)
_step = _number(int, "a whole number of at least 0", lambda value: value >= 0)
_not_negative = _number(float, "a number of at least 0", lambda value: 0 <= value < float("inf"))
_probability = _number(float, "a number above 0 and at most 1", lambda value: 0 < value <= 1)


def _started(arguments: argparse.Namespace) -> "Config":
    """The command's config, with JAX started as it asks: flags first, then the cluster.

    A process of a cluster becomes the supervisor of a worker, which runs the same command, and does not come back."""
    from longtrain.config import load
    from longtrain.parallel import lifeline, process
    from longtrain.parallel.cluster import find_cluster

    config = load(arguments.config, arguments.overrides)
    cluster = find_cluster(config, os.environ)
    if lifeline.is_worker():
        lifeline.hold()
    elif cluster is not None:
        from longtrain.supervisor import supervise

        raise SystemExit(supervise(arguments.words, cluster, config.cluster.timeout_seconds))
    flags = process.prepare_environment(config)
    process.join_cluster(config)
    if flags and process.is_first():
        print(f"XLA flags: {' '.join(flags)}", file=sys.stderr, flush=True)
    return config


def _train(arguments: argparse.Namespace) -> None:
    config = _started(arguments)
    from longtrain.parallel import process
    from longtrain.trainer import train

    with process.naming_lost_peers(config):
        train(config)


def _plan(arguments: argparse.Namespace) -> None:
    from longtrain.config import load
    from longtrain.errors import CheckFailed
    from longtrain.plan import estimate, report

    _refuse_options_that_say_nothing(arguments)
    plan = estimate.plan(
        load(arguments.config, arguments.overrides),
        arguments.hardware,
        devices=arguments.devices,
        document_tokens=arguments.document_tokens,
        assumptions_file=arguments.assumptions,
    )
    if (asked := arguments.document_tokens or 0) > plan.document_tokens:
        message = f"--document-tokens {asked:,} is more than a row: planned with {plan.document_tokens:,}"
        print(message, file=sys.stderr, flush=True)
    report.show(plan)
    if arguments.search:
        report.show_search(plan)
    if arguments.max_sequence:
        report.show_longest_row(plan)
    if not arguments.compile:
        _write_json(arguments.json, plan.to_json())
        if not plan.fits:
            raise CheckFailed(report.verdict(plan))
        return
    from longtrain.plan import audit, report_compiled

    found = audit.audit(plan, arguments.compiler, say=lambda message: print(message, file=sys.stderr, flush=True))
    report_compiled.show(found)
    if arguments.timeline is not None:
        if (picture := found.timeline()) is not None:
            _write("--timeline", arguments.timeline, picture)
        else:
            print(f"--timeline {arguments.timeline}: not drawn, there is no compiled program", file=sys.stderr)
    # The compiler's word on what fits stands above the formulas'.
    _write_json(arguments.json, plan.to_json() | {"fits": found.fits, "compiled": found.to_json()})
    if not found.fits:
        raise CheckFailed(report_compiled.verdict(found))
    if arguments.strict and found.findings:
        rules = ", ".join(dict.fromkeys(finding.rule for finding in found.findings))
        raise CheckFailed(f"--strict: the lint found {len(found.findings)}: {rules}")


def _refuse_options_that_say_nothing(arguments: argparse.Namespace) -> None:
    by_cpu, timeline = arguments.compiler == "cpu", f"--timeline {arguments.timeline}"
    given = {"--strict": arguments.strict, "--compiler cpu": by_cpu, timeline: arguments.timeline is not None}
    if not arguments.compile:
        ignored, why = [option for option, is_given in given.items() if is_given], "without --compile"
        message = "says nothing of a plan from formulas"
    else:
        ignored, why = [timeline] if by_cpu and given[timeline] else [], "with --compiler cpu"
        message = "has nothing to draw: the CPU's compiler says nothing of another device's time"
    if ignored:
        raise ConfigError([Problem(option, why, message) for option in ignored], "the plan")


def _doctor(arguments: argparse.Namespace) -> None:
    config = _started(arguments)
    from longtrain import doctor
    from longtrain.parallel import process

    first = process.is_first()
    checks = doctor.examine(config, say=lambda message: print(message, flush=True) if first else None)
    if first:
        _write_json(arguments.json, doctor.to_json(checks))
    verdict = doctor.verdict(checks)
    if first:
        print(verdict)


def _checkpoints(arguments: argparse.Namespace) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # files are read, no device is used
    from longtrain import difference, inventory
    from longtrain.errors import CheckFailed

    if arguments.diff is not None:
        if arguments.verify or arguments.delete:
            message = "compares and does nothing else: give --verify and --delete by themselves"
            raise ConfigError([Problem("--diff", arguments.diff, message)], "the command line")
        first, second = (difference.named(text, arguments.run_dir) for text in arguments.diff)
        apart = []
        for one in difference.differences(first, second):
            apart.append(one)
            print(one, flush=True)
        _write_json(arguments.json, [one.to_json() for one in apart])
        return
    rule = inventory.Rule.parse(arguments.delete) if arguments.delete is not None else None
    found = inventory.entries(arguments.run_dir)
    failed: list[str] = []
    told: list[dict[str, Any]] = []
    for entry in found:
        print(entry, flush=True)
        told.append(entry.to_json())
        if arguments.verify and entry.is_complete:
            whole, said = inventory.verify(entry)
            print(f"          {'ok' if whole else 'NOT OK'}: {said}", flush=True)
            told[-1] |= {"verified": whole, "detail": said}
            if not whole:
                failed.append(entry.path.name)
    if not found:
        print(f"{arguments.run_dir}: no checkpoint yet")
    if rule is not None:
        inventory.delete(arguments.run_dir, rule.takes(found), say=print)
    _write_json(arguments.json, told)
    if failed:
        raise CheckFailed(f"--verify: {', '.join(failed)}: not what was written, or not known to be")


def _convert_from_hf(arguments: argparse.Namespace) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # files are read and written, no device is used
    from longtrain import convert

    convert.from_hf(arguments.source, arguments.to, vocab_size=arguments.vocab_size, say=_say)


def _convert_to_hf(arguments: argparse.Namespace) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    from longtrain import convert

    options = {"dtype": arguments.dtype, "vocab_size": arguments.vocab_size}
    convert.to_hf(arguments.source, arguments.step, arguments.to, **options, say=_say)


def _say(message: str) -> None:
    print(message, flush=True)


def _bench_collectives(arguments: argparse.Namespace) -> None:
    from longtrain import bench
    from longtrain.bench import dry, report
    from longtrain.errors import CheckFailed

    overrides = [*(text for text in arguments.configs if "=" in text), *arguments.overrides]
    paths = [text for text in arguments.configs if "=" not in text]
    if not paths:
        raise ConfigError([Problem("CONFIG", arguments.configs, "must name a YAML file")], "the benchmark")
    asked = arguments.backends or list(bench.BACKENDS)

    def say(message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    if arguments.dry_run:
        compiled = dry.compile_all(paths, overrides, asked, arguments.hardware, say)
        report.show_compiled(compiled)
        _write_json(arguments.json, [one.to_json() for one in compiled])
        if too_large := [one.timed.name for one in compiled if one.found and not one.found.fits]:
            raise CheckFailed(f"does not fit: {', '.join(dict.fromkeys(too_large))}")
        return
    if arguments.hardware is not None:
        message = "has no meaning without --dry-run: what is here is timed"
        raise ConfigError([Problem("--hardware", arguments.hardware, message)], "the benchmark")
    counts = {"warmup": arguments.warmup, "steps": arguments.steps, "repeats": arguments.repeats}
    timed = bench.measure(paths, overrides, asked, **counts, say=say)
    all_refused = all(one.refused for one in timed)
    failed = [f"{one.name} on {one.backend}" for one in timed if one.failed]
    if all_refused or failed or any(one.step_seconds for one in timed):  # else another process has the results
        report.show(timed)
        _write_json(arguments.json, [one.to_json() for one in timed])
    if all_refused:
        raise CheckFailed("nothing could be timed: every backend is refused")
    if failed:
        raise CheckFailed(f"could not be timed: {', '.join(failed)}")


def _evaluate(arguments: argparse.Namespace) -> None:
    config = _started(arguments)
    from longtrain.evaluate import evaluate_run
    from longtrain.parallel import process

    line = evaluate_run(config, arguments.step, say=lambda message: print(message, file=sys.stderr))
    if process.is_first():
        print("  ".join(f"{name} {'not finite' if value is None else f'{value:,}'}" for name, value in line.items()))
        _write_json(arguments.json, line)


def _generate(arguments: argparse.Namespace) -> None:
    config = _started(arguments)
    from longtrain.generate import generate_from_run

    for text in generate_from_run(
        config,
        arguments.step,
        arguments.prompt,
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        say=lambda message: print(message, file=sys.stderr),
    ):
        print(text, end="", flush=True)
    print()


def _data_prepare(arguments: argparse.Namespace) -> None:
    from longtrain.config import load
    from longtrain.data import prepare

    prepared = prepare.ensure(load(arguments.config, arguments.overrides), log=print)
    if arguments.verify:
        prepared.verify(whole=True)
        print(f"data: {prepared.folder} is as it was written")


def _data_inspect(arguments: argparse.Namespace) -> None:
    from longtrain.config import load
    from longtrain.data import inspect

    config = load(arguments.config, arguments.overrides)
    found, text = inspect.inspect_step(config, arguments.step or 1, log=print, picture=arguments.picture)
    print(text)
    _write_json(arguments.json, found)


def _config_show(arguments: argparse.Namespace) -> None:
    from longtrain.config import show

    if arguments.config is None and not arguments.schema:
        arguments.parser.error("a CONFIG is needed, or --schema")
    text = show(arguments.config, arguments.overrides, origins=arguments.origins, schema=arguments.schema)
    sys.stdout.write(text)


def _write_json(path: Path | None, value: object) -> None:
    if path is not None:
        _write("--json", path, json.dumps(value) + "\n")


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        raise ConfigError([Problem(option, str(path), message)], "the command line") from None
