"""One line of a command each: what is typed, the exit code, and what it says.

What fails says it in one line and writes nothing (`says`).
"""

import re

import pytest

from autoshard import __version__

PLAN = "plan criteo-kaggle --topology cpu-8"
COMPARE = "compare criteo-kaggle --topology cpu-8"
SIMULATE = "simulate DOCUMENTS/tables.json --planner cost-greedy --batches 0"
COLLECT = "collect --store new"
MISSING = "must be a folder, or an address that begins with s3://"
#: What each command cannot be without; none of it is looked at before the options are.
NEEDED = {
    "import": "import nothing -o nothing.json",
    "collect": "collect --store nothing",
    "samples": "samples nothing",
    "train cost": "train cost --store nothing",
    "train step": "train step",
    "train policy": "train policy",
    "plan": "plan nothing --topology nothing",
    "compare": "compare nothing --topology nothing --planners random",
    "simulate": "simulate nothing",
    "run": "run nothing",
    "calibrate": "calibrate --tables nothing",
    "serve": "serve --host 256.256.256.256",
}

LINES = [
    ("--version", 0, f"autoshard {__version__}\n"),
    # Words that are no command, argument or option.
    ("nonsense", 2, "'nonsense'"),
    ("train", 2, "train --help"),
    ("list nonsense", 2, "planners"),
    ("plan", 2, "'TABLES'"),
    ("plan criteo-kaggle", 2, "--topology"),
    (f"{PLAN} --nonsense", 2, "--nonsense"),
    ("import metasyn", 2, "--output"),
    # Names and files that are not there, or are something else.
    ("plan criteo --topology cpu-8", 2, "criteo-kaggle"),
    ("plan criteo-kaggle --topology cpu", 2, "cpu-8"),
    (f"{PLAN} --planner nobody", 2, "cost-greedy"),
    (f"{PLAN} --registry /nowhere", 2, "/nowhere"),
    (f"{COLLECT} --registry /nowhere", 2, "/nowhere"),
    (f"{COLLECT} --registry http://x/y", 2, MISSING),
    (f"{COMPARE} --planners random,nobody", 2, "nobody"),
    ("show /nowhere/plan.json", 2, "/nowhere/plan.json"),
    ("show /", 2, "/"),
    ("replay missing.json", 2, "missing.json"),
    ("explain DOCUMENTS/plan.json --table t9", 2, 'error: table: no table of the plan is named "t9"\n'),
    ("import metasyn --format csv -o out", 2, "csv"),
    ("import /proc -o out", 2, "is a folder with no .json, .parquet or .pt files"),
    ("import /nowhere --format tbe-data-config -o out", 2, "/nowhere: cannot be read"),
    ("import /nowhere --format id-batches -o out", 2, "/nowhere: cannot be read"),
    ("samples missing", 1, "missing: "),
    ("collect --store DOCUMENTS/empty", 1, "/empty: is no folder"),
    (f"{COLLECT} --tables nonesuch", 2, "nonesuch"),
    ("train cost --store none --registry new", 1, "none"),
    ("train cost --store SAMPLES --registry new --device a100", 1, "a100", "cpu"),
    *((f"models --registry {name}", 2, MISSING) for name in ("http://x/y", "s3://", "file:///x", "s3://a?versionId=1")),
    # Files that cannot be written.
    *(
        (f"{PLAN} --planner random -o {file}", 2, file.removeprefix("DOCUMENTS"))
        for file in ("DOCUMENTS/empty/inside.json", "DOCUMENTS", "/proc/nothing/plan.json", "/dev/full")
    ),
    *(
        (f"{line} {file}", 2, f"{file.removeprefix('DOCUMENTS')}: cannot be written: ")  # before any work
        for line in (
            f"{PLAN} --time-limit 600 -o",
            "simulate nothing --image",
            "compare nothing --html",
            "import nothing -o",
            "export nothing -o",
            "detect -o",
            "simulate nothing -o",
            "samples missing --html",
            "checkpoint export nothing -o",
        )
        for file in ("DOCUMENTS/empty/inside.svg", "/dev/full")
    ),
    # Folders that are no checkpoint.
    *(
        (f"checkpoint {line}", 2, "nothing: is no checkpoint: must have a manifest.json, which is written last")
        for line in (
            "show nothing",
            "verify nothing",
            "export nothing -o out",
            "reshard nothing --plan DOCUMENTS/plan.json",
        )
    ),
    ("checkpoint show DOCUMENTS/empty", 2, "empty: is no checkpoint"),
    ("checkpoint reshard nothing --plan DOCUMENTS/empty", 2, "empty: is not JSON"),
    ("checkpoint import nothing --plan DOCUMENTS/plan.json -o out", 2, "nothing: is not there"),
    ("checkpoint import DOCUMENTS/empty --plan DOCUMENTS/plan.json -o out", 2, "empty: must be a folder of torch."),
    ("checkpoint import DOCUMENTS/empty --plan nothing -o out", 2, "nothing: cannot be read"),
    ("checkpoint import nothing --plan nothing -o out --step -1", 2, "'--step': "),
    # Values that an option does not take.
    *(
        (f"{needed} --seed {seed}", 2, "'--seed': ")
        for name, needed in NEEDED.items()
        if name not in ("samples", "serve")
        for seed in ("x", "1" * 25, 2**32, -1, "1.5")
    ),
    (f"{PLAN} --set x", 2, "KEY=VALUE"),
    (f"{PLAN} --planner random --set x=1", 2, "options.x"),
    (f"{PLAN} --set x=1 --set x=2", 2, "twice"),
    (f"{PLAN} --replay-refine 0", 2, "--replay-refine"),
    (f"{PLAN} --replay-refine two", 2, "--replay-refine"),
    *(
        (
            f"{NEEDED.get(name, 'replay nothing')} {options} tpu",
            2,
            f"'{options.split()[-1]}': 'tpu' is not one of 'auto', 'cpu', 'cuda'",
        )
        for name, options in [
            ("plan", "--replay-refine 1 --device"),
            ("compare", "--replay --device"),
            ("run", "--device"),
            ("replay", "--device"),
            ("collect", "--device"),
            ("calibrate", "--device"),
            ("train cost", "--accelerator"),
            ("train policy", "--accelerator"),
        ]
    ),
    ("run nothing --engine thick", 2, "'--engine': 'thick' is not one of 'thin', 'torchrec'"),
    ("run nothing --beta1 1", 2, "'--beta1': must be a number in [0, 1), got 1"),
    ("run nothing --learning-rate 0", 2, "'--learning-rate': must be a number above 0, got 0"),
    ("run nothing --weight-decay -1", 2, "'--weight-decay': must be a number of at least 0, got -1"),
    ("run nothing --weight-decay-mode sparse", 2, "'sparse' is not one of 'decoupled', 'l2'"),
    ("run nothing --nproc 0", 2, "nproc: must be a whole number of at least 1, or two such as 2:4, got 0"),
    ("run nothing --nproc 4:2", 2, "nproc: must be a whole number of at least 1, or two such as 2:4, got 4:2"),
    ("run nothing --nproc 2:4", 2, "nproc: of two numbers needs --max-restarts"),
    ("run nothing --nnodes 2", 2, "--rdzv: must be told with --nnodes, as HOST:PORT"),
    ("run nothing --nnodes 2 --rdzv host", 2, 'rdzv: must be HOST:PORT, got "host"'),
    ("run nothing --nnodes 2 --node-rank 2 --rdzv a:1", 2, "node_rank: must be a whole number in [0, 1], got 2"),
    ("run nothing --node-rank 1", 2, "node_rank: must be a whole number in [0, 0], got 1"),
    ("run nothing --data x --verify-steps 1", 2, "verify_steps: must be 0 where checkpoints are kept, files are"),
    ("run nothing --overlap neo", 2, 'overlap: must be one of none, pipelined, got "neo"'),
    ("run nothing --engine torchrec --overlap pipelined", 2, 'overlap: must be one of none, got "pipelined"'),
    ("run nothing --engine torchrec --replan-every 5", 2, "engine: must be thin where plans are changed, got torchrec"),
    ("run nothing --engine torchrec --write-access now.json", 2, "access_path: lookups are counted by the engine thin"),
    ("run nothing --write-access /nowhere/now.json", 2, "--write-access: must be in a folder that is there"),
    ("run nothing --replan-every -1", 2, "'--replan-every'"),
    ("run nothing --replan-horizon 5", 2, "--replan-horizon: needs --replan-every above 0"),
    ("run nothing --replan-every 5 --replan-horizon 0", 2, "'--replan-horizon': must be a number above 0, got 0"),
    ("run nothing --replan-every 5 --verify-steps 1", 2, "verify_steps: must be 0 where"),
    # What names something is looked up before files are read.
    *(
        (f"{NEEDED[name]} {options}", 2, text)
        for name, options, text in [
            ("plan", "--planner nobody", 'planner: no planner is named "nobody"'),
            ("plan", "--planner random --set x=1", "options.x: unknown option"),
            ("plan", "--payload fp8", "error: --payload: must be one of fp32, fp16, bf16, int8"),
            ("compare", "--set auto.x=1", "--set: must be PLANNER.KEY=VALUE"),
            ("compare", "--payload fp8", "error: --payload: must be one of"),
            ("simulate", "--planner nobody", 'planner: no planner is named "nobody"'),
            ("simulate", "--planner random --set x=1", "options.x: unknown option"),
            ("simulate", "--payload fp8", "error: --payload: must be one of"),
            ("simulate", "--ranks 8,x", "--ranks: must be different whole numbers above 0"),
            ("simulate", "--batch-size x", "--batch-size: must be different whole numbers above 0"),
            ("simulate", "--topology dgx-b300", "dgx-b300: is neither a file nor bundled topology"),
            ("simulate", "--batches 1", "error: --batches: must be 0, or at least 2, got 1"),
            ("simulate", "--ranks 12", "dgx-a100-12: ranks: must be a multiple of the 8 ranks of a node"),
            ("import", "--part 5/4", "--part: must be K/N with 1 <= K <= N, got"),
            ("collect", "--tables nothing --strategies nonesuch", "strategies: must be one of random, placements"),
            (
                "collect",
                "--tables nothing --kinds kernels,collectives --nproc 3",
                "node_size: must divide the 3 processes",
            ),
            ("samples", "--html x.html --tables nonesuch", "nonesuch: is neither a file nor bundled tables"),
            ("train step", "--store nothing --calibrate 4 --tables nonesuch", "nonesuch: is neither a file nor"),
        ]
    ),
    *(
        (
            f"{NEEDED.get(name, 'explain nothing')} {option} localhost",
            2,
            "server: must be the address of a service, such as http://localhost",
        )
        for name, option in [
            ("plan", "--server"),
            ("compare", "--server"),
            ("explain", "--server"),
            ("samples", "--send-to"),
        ]
    ),
    (
        f"{PLAN} --planner flexshard --replay-refine 2 -o plan.json",
        2,
        "replay_refine: takes plans whose shards are on single ranks",
    ),
    *(
        (f"{line} --payload fp8", 2, "error: --payload: must be one of fp32, fp16, bf16, int8")
        for line in (PLAN, f"{COMPARE} --planners random", SIMULATE)
    ),
    (f"{COMPARE} --planners ,", 2, "--planners"),
    (f"{COMPARE} --planners random,random", 2, "twice"),
    (f"{COMPARE} --planners auto --replay-refine -1", 2, "--replay-refine"),
    (f"{COMPARE} --planners random --replay-refine 2", 2, "--replay-refine: refines the plan of"),
    (f"{COMPARE} --planners auto --set tiers=all", 2, "--set: must be PLANNER.KEY=VALUE"),
    (f"{COMPARE} --planners auto --set random.tiers=all", 2, "--set: must be PLANNER.KEY=VALUE"),
    ("import metasyn --num-tables 857 -o out", 2, "num_tables"),
    ("import metasyn --num-tables 0 -o out", 2, "--num-tables"),
    ("import metasyn --scale 0 -o out", 2, "--scale"),
    ("import metasyn --part 5/4 -o out", 2, "--part"),
    ("import metasyn --part 1 -o out", 2, "K/N"),
    ("import metasyn --part 1/857 -o out", 2, "--part: must have at most 856 parts, the tables, got 1/857"),
    ("import metasyn --set embedding_dim=x -o out", 2, "embedding_dim"),
    ("import /x --format id-batches --set seed=1 -o out", 2, "embedding_dim, batch_size"),
    (
        f"import nothing.json --format tbe-data-config -o x.json --set seed={2**32}",
        2,
        "options.seed: must be a whole number in [0, 4294967295], got 4294967296",
    ),
    (
        f"{SIMULATE} --ranks 8,x",
        2,
        '--ranks: must be different whole numbers above 0 with commas between them, got "8,x"',
    ),
    (f"{SIMULATE} --ranks 8,8", 2, "must be different whole numbers"),
    (f"{SIMULATE} --ranks 0", 2, "must be different whole numbers above 0"),
    (f"{SIMULATE} --topology dgx-b300", 2, "dgx-b300: is neither a file nor bundled topology"),
    (
        f"{SIMULATE} --ranks 12",
        2,
        "dgx-a100-12: ranks: must be a multiple of the 8 ranks of a node, or fewer, got 12",
    ),
    (f"{SIMULATE} --topology a100-8 --ranks 16", 2, "a100-8: world_size: must be at most 8"),
    ("simulate DOCUMENTS/tables.json --planner nonsense", 2, 'no planner is named "nonsense"'),
    (f"{SIMULATE} --lengths long", 2, "'--lengths': 'long' is not one of 'declared', 'poisson'"),
    (
        f"{SIMULATE} --ranks 8 --groups 3",
        2,
        "error: replica_groups.num_groups: must divide the 8 ranks, got 3; so no point is possible",
    ),
    ("serve --port 70000", 2, "--port"),
    ("serve --host 192.0.2.1 --port 0", 2, "error: --host: cannot listen on 192.0.2.1:0: "),
    ("serve --host 0.0.0.0 --port 0", 2, "error: --host: 0.0.0.0 can be reached from other machines"),
    (f"{COLLECT} --scale 0", 2, "'--scale': Input should be greater than or equal to 1"),
    (f"{COLLECT} --seconds -1", 2, "'--seconds': must be a number above 0, got -1"),
    (f"{COLLECT} --num-samples 0", 2, "'--num-samples': Input should be greater"),
    (f"{COLLECT} --max-tables 0", 2, "'--max-tables': Input should be greater"),
    (f"{COLLECT} --memory-gib 0", 2, "'--memory-gib': must be a number above 0, got 0"),
    (f"{COLLECT} --kinds kernels,heat", 2, "kinds: must be some of kernels, dense, collectives"),
    (f"{COLLECT} --strategies random=0", 2, "strategies: must be names of strategies"),
    (f"{COLLECT} --strategies nonesuch", 2, "strategies: must be one of random, placements"),
    (f"{COLLECT} --ray --kinds dense", 2, "kinds: must be kernels with --ray"),
    ("train cost --store SAMPLES --updates 0", 2, "--updates"),
    ("train cost --store SAMPLES --alias best", 2, "--alias"),
    ("calibrate --refresh --updates 3", 2, "--updates: does nothing with --refresh, which scales and does not fit"),
    ("train step --calibrate 3", 2, "--calibrate: must be 0, or at least 4, got 3"),
    ("train policy --updates 0", 2, "--updates: must be at least 1 without --vtrace-updates, got 0"),
    ("train policy --updates -1", 2, "'--updates': Input should be greater than or equal to 0"),
    ("train policy --num-tasks 0", 2, "'--num-tasks': Input should be greater than or equal to 1"),
    ("train policy --search-seconds 0", 2, "'--search-seconds': must be a number above 0, got 0"),
    ("train policy --vtrace-updates -1", 2, "'--vtrace-updates': Input should be greater than or equal to 0"),
    # Larger than what any file holds.
    (f"detect --ranks {'9' * 25}", 2, "'--ranks'"),
    (f"detect --nodes {'9' * 25}", 2, "'--nodes'"),
    ("detect --ranks 1000 --nodes 1000", 2, "--nodes: must be at most 131,072 ranks"),
    (f"init --num-embeddings {'9' * 25}", 2, "'--num-embeddings'"),
    ("init --embedding-dim 65537", 2, "'--embedding-dim'"),
    ("init --pooling-factor 1e300", 2, "'--pooling-factor'"),
    (f"init --batch-size {'9' * 25}", 2, "'--batch-size'"),
    (f"init --num-tables 100 --num-embeddings {2**40} --embedding-dim 65536", 2, "in total"),
    (f"simulate nothing --batches {'9' * 13}", 2, "'--batches'"),
    # Options that go with others, or without them.
    *(
        (f"{NEEDED[name]} {options}", 2, f"error: {options.split()[0]}: needs {needed}\n")
        for name, options, needed in [
            ("import", "--seed 1", "--num-tables"),
            ("collect", "--ray-address local", "--ray"),
            ("collect", "--workers 2", "--ray"),
            ("collect", "--nproc 4", "--kinds collectives"),
            ("collect", "--node-size 4", "--kinds collectives"),
            ("collect", "--strategies random --kinds dense", "--kinds kernels"),
            ("collect", "--max-tables 3 --kinds dense", "--kinds kernels"),
            ("collect", "--memory-gib 3 --kinds dense", "--kinds kernels"),
            ("collect", "--tables metasyn --kinds dense", "--kinds kernels"),
            ("collect", "--scale 3 --kinds dense,collectives", "--kinds kernels"),
            ("samples", "--tables metasyn", "--html or --image"),
            ("samples", "--scale 2 --html x.html", "--tables"),
            ("train cost", "--alias candidate --no-publish", "--publish"),
            ("train policy", "--alias candidate --no-publish", "--publish"),
            ("train step", "--nproc 3 --store nothing", "--calibrate"),
            ("train step", "--seed 3 --store nothing", "--calibrate"),
            ("run", "--epochs 2", "--data"),
            ("run", "--shuffle 2", "--data"),
            ("run", "--drift-every 2 --data x", "generated samples, without --data"),
            ("run", "--keep 2", "--checkpoints"),
            ("run", "--checkpoint-every 2", "--checkpoints"),
            ("run", "--max-restarts 2", "--checkpoints"),
            ("run", "--metrics-every 2", "--metrics"),
            ("run", "--rdzv a:1", "--nnodes"),
            ("plan", "--device cpu", "--replay-refine"),
            ("compare", "--device cpu", "--replay or --replay-refine"),
            ("simulate", "--sync-every 2", "--groups or --group-size"),
            ("simulate", "--layout within_nodes", "--groups or --group-size"),
            ("simulate", "--lengths poisson --batches 0", "--batches above 0"),
        ]
    ),
    ("explain nothing --most 3 --table t0", 2, "error: --most: needs --table left out\n"),
    ("models list --alias candidate", 2, "error: --alias: needs promote or roll-back\n"),
    *(
        (f"train {what} --force {other}", 2, "--force: goes with --alias production only")
        for what in ("cost --store SAMPLES", "policy")
        for other in ("--no-publish", "--alias candidate")
    ),
    (f"{SIMULATE} --groups 1 --group-size 8", 2, "--groups: cannot be given with --group-size"),
    (f"{SIMULATE} --batch-size 1 --batch-per-rank 8", 2, "cannot be given with --batch-per-rank"),
    *(
        (
            f"{line} {option} --server http://127.0.0.1:1",
            2,
            f"error: {option.split()[0]}: cannot be given with --server\n",
        )
        for line, option in [
            (PLAN, "--replay-refine 2"),
            (PLAN, "--assume-row-order"),
            (f"{COMPARE} --planners random", "--replay"),
            ("explain plan.json", "--registry ."),
        ]
    ),
    # Options of planners.
    *(
        (
            f"plan DOCUMENTS/tables.json --topology DOCUMENTS/topology.json --planner {planner} --set {setting} -o out",
            code,
            text,
        )
        for planner, setting, code, text in [
            ("flexshard", "memory_multiplier=-2", 2, "options.memory_multiplier: must be at least 0, got -2"),
            ("flexshard", "memory_budget_bytes=x", 2, 'options.memory_budget_bytes: must be a whole number, got "x"'),
            ("flexshard", "memory_multiplier=nan", 2, 'options.memory_multiplier: must be a number, got "nan"'),
            ("oper", "extra_memory_ratio=-1", 2, "options.extra_memory_ratio: must be"),
            ("replica-groups", "num_groups=3", 2, "options.num_groups: must divide the 4 ranks, got 3"),
            ("replica-groups", "num_groups=8", 2, "options.num_groups: must divide the 4 ranks, got 8"),
            ("replica-groups", "num_groups=-1", 2, "options.num_groups: must be at least 0, got -1"),
            *(
                (
                    "flexshard",
                    f"rule={rule} --set memory_budget_bytes=-1000000",
                    3,
                    " bytes over row-wise sharding, got -1,000,000",
                )
                for rule in ("frontier", "paper")
            ),
        ]
    ),
    # Studies.
    ("studies engines --layouts diagonal", 2, "must be any of table-wise, row-wise, mixed, got 'diagonal'"),
    ("studies engines --batch-sizes few", 2, "--batch-sizes"),
    (
        "studies slow-links --parts parts --kernel-samples . --rates fast",
        2,
        "--rates: each must be a number above 0, with commas between them, got 'fast'",
    ),
    ("studies moments --nproc 3", 2, "--nproc: must be a power of 2, got 3"),
    ("studies moments --nproc 4", 2, "--max-groups: must be at most the 4 processes, got 8"),
    ("studies moments --batch-size 100", 2, "--batch-size: must be a multiple of the 8 processes, got 100"),
    ("studies eviction --repetitions 0", 2, "'--repetitions': Input should be greater than or equal to 1"),
    ("studies eviction --device tpu", 2, "'--device': 'tpu' is not one of 'auto', 'cpu', 'cuda'"),
    ("studies fig4 --device cpu --combinations 0", 2, "'--combinations': Input should be greater than or equal to 1"),
    ("studies fig4 --device cpu --max-rows 10", 2, "'--max-rows': Input should be greater than or equal to 1000"),
    ("studies fig4 --device cpu --batch-size 0", 2, "'--batch-size': Input should be greater than or equal to 1"),
    (
        "studies fooled --samples 20",
        2,
        "--samples: each must be a whole number of at least 50, with commas between them, got '20'",
    ),
    (
        "studies fooled --noise much",
        2,
        "--noise: each must be a number of at least 0, with commas between them, got 'much'",
    ),
    (
        "studies fooled --steps=",
        2,
        "--steps: each must be a whole number of at least 0, with commas between them, got ''",
    ),
    (
        "studies limits --tasks 90-cpu",
        2,
        "--tasks: must be any of 80-cpu, ",
        "got '90-cpu'",
    ),
    ("studies never-beaten --planners best", 2, "--planners: must be any of cost-greedy, "),
    ("studies hours --store nothing", 1, "nothing: is no folder"),
    (
        "studies calibrate --seconds few",
        2,
        "--seconds: each must be a number above 0, with commas between them, got 'few'",
    ),
    (
        "studies side-by-side --planners random,best",
        2,
        "--planners: must be any of auto, cost-greedy, ",
        "got 'random,best'",
    ),
    ("studies side-by-side --planners random --refine 1", 2, "--refine: refines the plan of auto+whole"),
    ("studies side-by-side --planners auto", 2, "--planners: must name random"),
    ("studies gpu -o out --stages card,vard", 2, "must be any of card, clock"),
    ("studies cost-models --store none", 1, "none"),
]


@pytest.mark.parametrize(("line", "code", "texts"), [(line, code, texts) for line, code, *texts in LINES], ids=str)
def test_a_line(says, line, code, texts):
    said = says(line, code)
    for text in texts:
        assert text in said


@pytest.mark.parametrize("command", NEEDED)
def test_every_number_is_checked_by_its_option_as_the_help_says(says, command):
    text = says(f"{command} --help", 0)
    options = re.findall(
        r"^  (?:-\w, )?(--[\w-]+) (<(?:float|int).*?>|N  )(.*?)(?=^  -)", text, re.MULTILINE | re.DOTALL
    )
    assert options
    for name, kind, rest in options:
        least = re.search(r"x>=(\d+)|(\d+)<=x<=", " ".join(rest.split()))
        values = [int(least[1] or least[2]) - 1] if least else ["inf", "-inf"]
        outside = {"above 0": "0", "at least 0": "-1e-9", "in [0, 1)": "1", "N": "0"}
        values += [] if least else [next(value for words, value in outside.items() if words in kind)]
        for value in ("x", "nan", *values):
            said = says(f"{NEEDED[command]} {name} {value}", 2)
            assert f"'{name}'" in said or f"{name}: must be" in said, (name, value)
