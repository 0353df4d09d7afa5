"""Command lines of DLRM's two programs, as people write them."""

import re
import shlex
from pathlib import Path

import pytest

from autoshard.core import DType, Optimizer
from autoshard.core.errors import InputError
from autoshard.formats import import_tables

PYTORCH = "python dlrm_s_pytorch.py --arch-embedding-size=1461-584-10131227-27 --arch-sparse-feature-size=16"
CRITEO = "39884406-39043-17289-7420-20263-3-7120-1543-63-38532951-2953546-403346-10-2208-11938-155-4-976-14-39979771"
CRITEO += "-25641295-39664984-585935-12972-108-36"
HOT = "3,2,1,2,6,1,1,1,1,7,3,8,1,6,9,5,1,1,1,12,100,27,10,3,1,1"
ROWS = "40000000,39060,17295,7424,20265,3,7122,1543,63,40000000,3067956,405282,10,2209,11938,155,4,976,14,40000000"
ROWS += ",40000000,40000000,590152,12973,108,36"
MAIN = f"dlrm_main.py -- --embedding_dim 128 --num_embeddings_per_feature {ROWS} --batch_size 2048"


def rows(tables):
    return [table.num_embeddings for table in tables.tables]


def factors(tables):
    return [table.features[0].pooling_factor for table in tables.tables]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("--data-generation=dataset --max-ind-range=1000000", [1461, 584, 1_000_000, 27]),
        ("--data-generation dataset --max-ind-range 500", [500, 500, 500, 27]),
        ("--data-generation dataset --max-ind 584", [584, 584, 584, 27]),
        ("--data-generation dataset --max_ind_range=27", [27, 27, 27, 27]),
        ("--data-generation dataset --max-ind-range=-1", [1461, 584, 10131227, 27]),
        ("--max-ind-range=500 --data-generation=dataset --max-ind-range=1000", [1000, 584, 1000, 27]),
        ("--max-ind-range 500", [1461, 584, 10131227, 27]),
    ],
)
def test_rows_of_data_sets_end_at_the_limit(options, wanted):
    assert rows(import_tables(f"{PYTORCH} {options}")) == wanted


def test_the_limit_of_the_terabyte_script_leaves_its_54_million_rows():
    command = f"dlrm_s_pytorch.py --arch-embedding-size={CRITEO} --max-ind-range=10000000 --data-generation=dataset"
    found = import_tables(f"{command} --arch-sparse-feature-size=64")
    assert sum(rows(found)) == 54_063_992
    assert set(factors(found)) == {1.0}


def test_rows_that_the_program_counts_are_those_of_the_kaggle_data(caplog):
    found = import_tables("dlrm_s_pytorch.py --data-generation=dataset --arch-sparse-feature-size=16")
    assert (len(found.tables), sum(rows(found)), rows(found)[:3]) == (26, 33_762_577, [1460, 583, 10_131_227])
    assert "--arch-embedding-size: left out, so that rows are those of --data-set=kaggle" in caplog.text
    limited = import_tables("dlrm_s_pytorch.py --data-generation=dataset --data-set kaggle --max-ind-range=1000")
    assert rows(limited)[:6] == [1000, 583, 1000, 1000, 305, 24]


def test_options_that_are_left_out_are_those_of_the_programs(caplog):
    found = import_tables("python dlrm_s_pytorch.py --data-size=6")
    assert (rows(found), found.tables[0].embedding_dim, found.batch_size) == ([4, 3, 2], 2, 1)
    assert "--mini-batch-size: left out, so that it is 1" in caplog.text
    caplog.clear()
    found = import_tables("python dlrm_main.py --print_lr")
    assert (rows(found), found.tables[0].embedding_dim, found.batch_size) == ([100_000] * 26, 64, 32)
    assert found.tables[25].name == "t_cat_25"
    assert found.tables[0].optimizer is Optimizer.SGD
    assert (found.dense.num_dense_features, found.dense.bottom_mlp, found.dense.top_mlp) == (
        13,
        (512, 256, 64),
        (512, 512, 256, 1),
    )
    assert "--batch_size: left out, so that it is 32" in caplog.text
    assert "the command does not say how many processes it has" in caplog.text


@pytest.mark.parametrize(
    ("launcher", "batch"),
    [
        ("torchx run -s local_cwd dist.ddp -j 1x8 --script", 16384),
        ("torchx run -s slurm dist.ddp -j2x4 --script", 16384),
        ("torchx run -s slurm dist.ddp -j 4 --script", 8192),
        ("torchrun --nnodes 2 --nproc_per_node 8 --role trainer", 32768),
        ("torchrun --nproc-per-node=3", 6144),
        ("CUDA_VISIBLE_DEVICES=0,1 python -m torch.distributed.launch --nproc_per_node=2", 4096),
        ("WORLD_SIZE=16 LOCAL_RANK=0 python", 32768),
        ("mpirun -np 4 python", 8192),
        ("srun -N 2 --ntasks-per-node=8 python -u", 32768),
        ("srun --nodes=4 --ntasks-per-node=1 torchrun --nnodes=4 --nproc_per_node=8", 65536),
        ("srun -N4 --ntasks-per-node=1 torchrun --nproc-per-node 8", 65536),
        ("srun --ntasks=32 --ntasks-per-node=8 python", 65536),
        ("srun -n 32 --ntasks-per-node 8 python", 65536),
        ("salloc -N 4 srun -n16 python", 32768),
        ("/usr/bin/mpirun --np 8 python", 16384),
        ("mpiexec -n 8 nice -n 10 python", 16384),
        ("srun --ntasks-per-node=8 numactl -N 0 -m 0 python", 16384),
        ("numactl -N 1 torchrun --nnodes=2 --nproc_per_node=4", 16384),
        ("numactl -N 0 -m 0 torchrun --nproc_per_node=4", 8192),
        ("srun -N 4 torchrun --nnodes=$SLURM_NNODES --nproc_per_node=8", 65536),
        ("jsrun -n 8 python", 16384),
        ("jsrun -n2 -a4 -g4 python", 16384),
        ("jsrun --np 16 python", 32768),
        ("aprun -n 8 -N 4 python", 16384),
        ("mpirun_rsh -np 8 host1 host2 python", 16384),
        ("orterun -n 8 python", 16384),
        ("mpiexec.openmpi -n 8 python", 16384),
        ("a_launcher -np 8 python", 16384),
        ("conda run -n dlrm torchrun --nproc_per_node=4", 8192),
        ("conda run -n dlrm python", 2048),
        ("nice -n 10 python", 2048),
        ("python", 2048),
    ],
)
def test_the_batch_of_dlrm_main_is_that_of_one_process(launcher, batch):
    assert import_tables(f"{launcher} {MAIN}").batch_size == batch
    assert import_tables(f"{launcher} {MAIN}", batch_size=5).batch_size == 5


@pytest.mark.parametrize(
    ("lines", "launcher", "batch"),
    [
        ("#SBATCH --nodes=4", "srun --ntasks-per-node=8 python", 65536),
        ("#SBATCH --job-name=a -N 2\n#SBATCH --ntasks-per-node 8", "srun python", 32768),
        ("#SBATCH -n 16", "srun python", 32768),
        ("#SBATCH --nodes=4", "srun --nodes=1 --ntasks-per-node=8 python", 16384),
        ("#SBATCH --nodes=4", "torchrun --nproc_per_node=8", 16384),
        ("#SBATCH --nodes=4 --ntasks=4", "srun torchrun --nproc_per_node=8", 65536),
        ("#SBATCH --nodes=4", "srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=8", 65536),
        ("#SBATCH -N 4", "srun -N $SLURM_NNODES --ntasks-per-node=8 python", 65536),
        ("#SBATCH -N 4 --ntasks=32", "srun --ntasks=${SLURM_NTASKS} python", 65536),
    ],
)
def test_a_job_of_slurm_says_what_srun_leaves_out(lines, launcher, batch, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(f"#!/bin/bash\n{lines}\n{launcher} {MAIN}\n")
    assert import_tables(path).batch_size == batch


def test_one_node_is_taken_with_a_note(caplog):
    assert import_tables(f"srun --ntasks-per-node=8 python {MAIN}").batch_size == 16384
    assert "--nodes: left out, so that 1 is taken" in caplog.text


def test_a_component_of_torchx_starts_dlrm_main():
    command = "torchx run --scheduler slurm aws_component.py:run_dlrm_main --num_trainers=8 -- --pin_memory"
    found = import_tables(
        f"{command} --batch_size 16 --num_embeddings=7 --embedding-dim 8 --dense_arch_layer_sizes 4,8"
    )
    assert (rows(found), found.batch_size, found.dense.bottom_mlp) == ([7] * 26, 128, (4, 8))


def test_features_of_dlrm_main_have_the_ids_that_it_makes():
    found = import_tables(f"python {MAIN} --adagrad --multi_hot_distribution_type uniform --multi_hot_sizes={HOT}")
    assert factors(found) == [float(one) for one in HOT.split(",")]
    assert rows(found) == [int(one) for one in ROWS.split(",")]
    assert {table.optimizer for table in found.tables} == {Optimizer.ADAGRAD}
    assert set(factors(import_tables(f"python {MAIN} --in_memory_binary_criteo_path=/data"))) == {1.0}
    three = import_tables("dlrm_main.py --num_embeddings_per_feature=5,6,7 --multi-hot-sizes 1,20,3 --embedding_dim=16")
    assert (rows(three), factors(three)) == ([5, 6, 7], [1.0, 20.0, 3.0])


def test_the_program_of_2022_has_one_number_of_ids_for_large_tables():
    three = "dlrm_main.py --num_embeddings_per_feature=199,200,6000 --embedding_dim=16"
    assert factors(import_tables(f"{three} --multi_hot_size 20")) == [1.0, 20.0, 20.0]
    assert factors(import_tables(f"{three} --multi_hot_size=20 --multi_hot_min_table_size=1000")) == [1.0, 1.0, 20.0]
    assert factors(import_tables(f"{three} --multi_hot_size=1,20,3")) == [1.0, 20.0, 3.0]


@pytest.mark.parametrize(
    ("command", "note"),
    [
        (f"{PYTORCH} --fancy-option 3", "--fancy-option 3: not read, for dlrm_s_pytorch.py has no such option"),
        (f"{PYTORCH} $extra", "$extra: the script does not set it, and options in it are not read"),
        (f"{PYTORCH} --max-ind-range=500", "--max-ind-range: without effect"),
        (f"{PYTORCH} --data-generation=dataset", "--data-generation: rows are taken to be looked up alike"),
        (f"{MAIN} --in_memory_binary_criteo_path=/data", "--in_memory_binary_criteo_path: not read; rows are taken to"),
        (
            "dlrm_s_pytorch.py --arch-sparse-feature-size=16 --data-generation=dataset --data-set=kaggle $extra",
            "--arch-embedding-size: left out, so that rows are those of --data-set=kaggle",
        ),
        (f"{PYTORCH} --weighted-pooling=learned", "--weighted-pooling: its weight for each row"),
        (f"{PYTORCH} --rand-data-dist=gaussian", "--rand-data-dist: not read"),
        (f"{PYTORCH} --num-indices-per-lookup-fixed=False", "--num-indices-per-lookup-fixed: taken for true"),
        (f"{PYTORCH} --arch-mlp-bot=4-8 --arch-mlp-top=8-1", "--arch-mlp-bot: the dense layers are left out"),
        (
            f"{PYTORCH} --arch-mlp-bot=4-16 --arch-mlp-top=8-1 --arch-interaction-itself",
            "--arch-interaction-itself: not",
        ),
        (f"{MAIN} --interaction_type=dcn", "--interaction_type: the dense layers are left out"),
        (f"{MAIN} --interaction_type projection", "--interaction_type: the dense layers are left out"),
        (
            f"{MAIN} --synthetic_multi_hot_criteo_path $DATA",
            "--synthetic_multi_hot_criteo_path: ids per sample stand in",
        ),
        (f"{MAIN} --multi_hot_distribution_type=pareto", "--multi_hot_distribution_type: not read"),
        ("dlrm_main.py --num_embeddings_per_feature=5,6 --embedding_dim=64", "expects 26 numbers, got 2"),
        ("dlrm_main.py --embedding_dim=16", "--dense_arch_layer_sizes: the dense layers are left out"),
    ],
)
def test_what_is_not_read_is_told(command, note, caplog):
    assert import_tables(command).tables
    assert note in caplog.text


def test_features_that_are_concatenated_leave_the_bottom_perceptron_any_width():
    found = import_tables(f"{PYTORCH} --arch-interaction-op=cat --arch-mlp-bot=13-24 --arch-mlp-top 8-1")
    assert (rows(found), found.dense.bottom_mlp) == ([1461, 584, 10131227, 27], (24,))
    assert (found.dense.top_mlp, found.dense.interaction) == ((8, 1), "concat")
    assert import_tables(f"{PYTORCH} --arch-mlp-bot=13-16 --arch-mlp-top 8-1").dense.interaction == "dot"


def test_a_perceptron_that_is_left_out_is_the_programs():
    bottom = import_tables(f"{PYTORCH} --arch-mlp-bot=13-16").dense
    assert (bottom.bottom_mlp, bottom.top_mlp) == ((16,), (4, 2, 1))
    top = import_tables("dlrm_s_pytorch.py --arch-embedding-size=5-6 --arch-mlp-top=8-1").dense
    assert (top.num_dense_features, top.bottom_mlp, top.top_mlp) == (4, (3, 2), (8, 1))
    assert import_tables(PYTORCH).dense is None


def test_weighted_pooling_weights_all_lookups():
    plain, weighted = (import_tables(f"{PYTORCH}{option}").tables for option in ("", " --weighted-pooling=fixed"))
    assert {table.weighted for table in plain} == {False}
    assert {table.weighted for table in weighted} == {True}


def test_tables_of_inference_have_no_optimizer_state():
    found = import_tables(f"{PYTORCH} --optimizer=adagrad --inference-only --quantize-emb-with-bit=8")
    assert {(table.optimizer, table.dtype) for table in found.tables} == {(Optimizer.SGD, DType.INT8)}
    trained = import_tables(f"{PYTORCH} --optimizer=adagrad --quantize-emb-with-bit=8")
    assert {(table.optimizer, table.dtype) for table in trained.tables} == {(Optimizer.ADAGRAD, DType.FP32)}


def test_the_command_of_the_docs_is_read():
    page = Path(__file__).parents[2] / "docs/how-to/import-configurations.md"
    [block] = re.findall("```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    program, command, source, *_ = shlex.split(block)
    assert (program, command) == ("autoshard", "import")
    found = import_tables(source)
    assert (rows(found), found.batch_size, found.dense.bottom_mlp) == ([1000] * 26, 16384, (512, 256, 64))


SCRIPT = """#!/bin/bash
if [[ $# == 1 ]]; then
    extra=$1
else
    extra=""
fi
program="python dlrm_s_pytorch.py"
rows=100-200
dim=$((4 * 8))
args=" --arch-embedding-size="${rows}\\
" --arch-sparse-feature-size="$dim
echo $program --arch-embedding-size=1
cmd="numactl -m 0 $program --mini-batch-size=64 $args $extra > log"
eval $cmd
python dlrm_s_caffe2.py --mini-batch-size=${BATCH:-64} --caffe2-net-type=simple $args | tee log
mv dlrm_s_pytorch.prof kept
"""


def test_a_script_is_read_with_its_variables(tmp_path, caplog):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    found = import_tables(path)
    assert (rows(found), found.tables[0].embedding_dim, found.batch_size) == ([100, 200], 32, 64)
    assert "$extra: the script does not set it" in caplog.text
    path.write_text(SCRIPT.replace("BATCH:-64", "BATCH:-32"))
    with pytest.raises(InputError, match="holds commands for 2 different sets of tables or batches"):
        import_tables(path)
    assert import_tables(path, batch_size=8).batch_size == 8


def test_a_script_is_read_with_its_arrays(tmp_path):
    path = tmp_path / "run.sh"
    options = "--embedding_dim 128  # of all\n  --num_embeddings_per_feature 5,6,7\n"
    started = 'torchrun --nproc_per_node=8 dlrm_main.py "${ARGS[@]}"'
    path.write_text(f'ARGS=(\n  {options})\nARGS+=( --batch_size "2048" )\n{started}\n')
    found = import_tables(path)
    assert (rows(found), found.tables[0].embedding_dim, found.batch_size) == ([5, 6, 7], 128, 16384)


@pytest.mark.parametrize(
    "command",
    [
        "python main.py --arch-embedding-size=5-6",
        "$PROGRAM --num-embeddings-per-feature=5,6 --embedding_dim=64",
        "python -m torch.distributed.run $PROGRAM --num_embeddings_per_feature 5,6 --embedding_dim 64",
    ],
)
def test_a_command_without_the_programs_name_is_known_by_its_options(command):
    assert rows(import_tables(command)) == [5, 6]


def test_a_launcher_counts_processes_of_a_program_that_is_not_named():
    command = "torchrun --nproc_per_node=4 $PROGRAM --num_embeddings_per_feature=5,6 --embedding_dim=64 --batch_size=16"
    assert import_tables(command).batch_size == 64


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "dlrm_s_pytorch.py --data-generation=dataset --data-set=terabyte",
            "--arch-embedding-size: is missing: with --data-generation=data",
        ),
        (f"{PYTORCH} --data-generation=internal", "--data-generation: must be one of random, dataset"),
        (f"{PYTORCH} --md-flag", "--md-flag: makes tables of mixed dimensions"),
        (f"{PYTORCH} --qr-f", "--qr-flag: makes quotient-remainder tables"),
        (f"{PYTORCH} --num=3", "ambiguous option: --num=3 could match --num-batches"),
        (f"{PYTORCH} --arch-interaction-op=concat", '--arch-interaction-op: must be one of dot, cat, got "concat"'),
        (
            "dlrm_s_pytorch.py --arch-embedding-size=5-0",
            '--arch-embedding-size: must be whole numbers with "-" between',
        ),
        ("dlrm_s_pytorch.py --arch-embedding-size=$EMB", 'got "$EMB"; the script does not set the variable'),
        (f"{PYTORCH} --inference-only --quantize-emb-with-bit=4", "--quantize-emb-with-bit: must be one of 32, 8"),
        (f"{MAIN} --multi_hot_sizes=1,2", "--multi_hot_sizes: must be 26 numbers, one for each table, got 2"),
        (f"{MAIN} --interaction_type=cat", "--interaction_type: must be one of original, dcn, projection"),
        (
            f"torchrun --nnodes=$N --nproc_per_node=8 {MAIN}",
            "--nnodes: must be a whole number, or the option batch_size has to say",
        ),
        (
            f"srun -N $N --ntasks-per-node=8 {MAIN}\n#SBATCH --nodes=4",
            "-N: must be a whole number, or the option batch_size has to say",
        ),
        (
            f"torchrun --nproc_per_node=gpu {MAIN}",
            "--nproc_per_node: must be a whole number, or the option batch_size has to say",
        ),
        ("torchrun materialize.py --num_embeddings_per_feature=1,2", "holds no command of"),
        ("python my_dlrm_main.py --num_embeddings_per_feature=1,2", "holds no command of"),
        ("python -m trainer --num_embeddings 5 --over_arch_layer_sizes=8,1", "holds no command of"),
        ("python train.py --embedding_dim 64 --batch_size 4096 --learning_rate 0.01", "holds no command of"),
        (
            'CMD="python3.6 -m dlrm.scripts.main --batch_size 32768 --embedding_dim 128"\n$CMD',
            "holds no command of dlrm_s_pytorch.py or dlrm_main.py",
        ),
        (
            "dlrm_main.py --embedding_dim 64 $ARGS",
            "--num_embeddings: must be given: it may stand in $ARGS, which the script does not set",
        ),
        ('dlrm_main.py --num_embeddings=5 "${ARGS[@]}"', "--embedding_dim: must be given: it may stand in ${ARGS[@]}"),
        ("dlrm_s_pytorch.py --arch-embedding-size=5-6 `cat options`", "--arch-sparse-feature-size: must be given"),
        ("dlrm_s_pytorch.py --arch-sparse-feature-size=2 $@", "--arch-embedding-size: must be given"),
        (
            "dlrm_s_pytorch.py --arch-sparse-feature-size=2 --data-generation=dataset $ARGS",
            "--data-set: must be given: it may stand in $ARGS, which the script does not set",
        ),
    ],
)
def test_what_cannot_be_imported_is_refused_in_the_commands_words(command, message, tmp_path):
    path = tmp_path / "command.sh"
    path.write_text(command)
    with pytest.raises(InputError) as raised:
        import_tables(path)
    assert message in str(raised.value)
