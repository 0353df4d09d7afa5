"""Files of facebookresearch/dlrm_datasets: read exactly, and never executed."""

import gzip
import io
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

from autoshard.core import AccessProfile
from autoshard.core.batches import draw_bags
from autoshard.core.errors import FormatError
from autoshard.formats import import_tables, read_dlrm_datasets
from autoshard.formats.archives.torch_archive import read_tensors

BATCH_SIZE = 2000
PROFILES = [
    AccessProfile.zipf(50_000, 1.05),
    AccessProfile.uniform(30_000),
    AccessProfile.zipf(500, 0.8),
    AccessProfile.uniform(10),
]
POOLING_FACTORS = [12.5, 3.0, 1.0, 0.0]


def batch():
    """Tensors as AutoShard A.1 describes them: ids by table and sample, offsets into them, lengths [table, sample]."""
    rng = np.random.default_rng(0)
    bags = [
        draw_bags(profile, factor, BATCH_SIZE, rng) for profile, factor in zip(PROFILES, POOLING_FACTORS, strict=True)
    ]
    lengths = torch.from_numpy(np.stack([one.lengths_B for one in bags]))
    indices = torch.from_numpy(np.concatenate([one.ids_L for one in bags]))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    return indices, offsets, lengths


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "batch.pt"
    torch.save(batch(), path)
    return path


class TestReading:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("packed", [False, True])
    def test_tables_are_those_of_the_batch(self, dtype, packed, tmp_path):
        path = tmp_path / "batch.pt"
        torch.save(tuple(tensor.to(dtype) for tensor in batch()), path)
        if packed:
            path = path.with_suffix(".pt.gz")
            path.write_bytes(gzip.compress((tmp_path / "batch.pt").read_bytes()))
        told = []
        read = import_tables(path, advance=told.append, seed=3)
        indices, _, lengths = batch()
        ends = np.concatenate([[0], np.cumsum(lengths.sum(dim=1).numpy())])
        assert read.batch_size == BATCH_SIZE
        assert sum(told) == pytest.approx(1)
        assert {table.embedding_dim for table in read.tables} <= {16, 32}
        for index, table in enumerate(read.tables):
            ids = indices[ends[index] : ends[index + 1]].numpy()
            assert table.num_embeddings == (ids.max() + 1 if len(ids) else 1)
            assert table.pooling_factor == POOLING_FACTORS[index]
            assert table.features[0].pooling_p99 == np.ceil(POOLING_FACTORS[index])
            assert table.features[0].pooling_variance == pytest.approx(lengths[index].double().var(correction=0).item())

    def test_a_next_batch_hits_about_as_many_rows(self, file):
        """Within 15% of what the profiles that the batch was drawn from expect, hot and rare rows alike."""
        for table, profile in zip(read_dlrm_datasets(file).tables[:3], PROFILES, strict=False):
            num_lookups = BATCH_SIZE * table.pooling_factor
            for share in (0.1, 1.0):
                expected = profile.expected_distinct(num_lookups * share)
                assert table.access.expected_distinct(num_lookups * share) == pytest.approx(expected, rel=0.15)

    def test_the_dimension_can_be_chosen_and_is_drawn_by_seed_otherwise(self, file):
        assert {table.embedding_dim for table in read_dlrm_datasets(file, embedding_dim=64).tables} == {64}
        drawn = {
            tuple(table.embedding_dim for table in read_dlrm_datasets(file, seed=seed).tables) for seed in range(9)
        }
        assert len(drawn) > 3
        assert read_dlrm_datasets(file, seed=1) == read_dlrm_datasets(file, seed=1)

    def test_views_of_a_larger_storage_are_read_where_they_lie(self, tmp_path):
        whole = torch.arange(1000)
        torch.save((whole[10:20], whole[500:501], whole[100:120].reshape(4, 5)), tmp_path / "views.pt")
        with (tmp_path / "views.pt").open("rb") as file:
            first, second, third = read_tensors(file)
            assert first.tolist() == list(range(10, 20))
            assert second.tolist() == [500]
            assert third.tolist() == torch.arange(100, 120).reshape(4, 5).tolist()


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def rewritten(source, target, name, content):
    """A copy of an archive in which one member has another content."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, content if info.filename.endswith(name) else old.read(info))
    return target


class TestRefusing:
    @pytest.mark.parametrize("seed", range(40))
    def test_a_damaged_list_of_members_is_one_line_or_does_no_harm(self, seed, tmp_path):
        path = tmp_path / "small.pt"
        torch.save((torch.arange(20), torch.arange(11) * 2, torch.full((1, 10), 2)), path)
        whole = import_tables(path)
        content, rng = bytearray(path.read_bytes()), np.random.default_rng(seed)
        for _ in range(3):
            content[rng.integers(len(content) - 400, len(content))] = rng.integers(256)
        path.write_bytes(content)
        refusal = ""
        try:
            assert import_tables(path) == whole  # the damage is in what no reader needs
        except FormatError as error:
            refusal = str(error)
        assert not refusal or (refusal.startswith(f"{path}: ") and "\n" not in refusal)

    def test_names_of_members_that_are_no_text(self, file):
        content = file.read_bytes()
        at = content.rindex(b"byteorder")
        file.write_bytes(content[:at] + b"\xff\xfe" + content[at + 2 :])
        flags = content.rindex(b"PK\x01\x02", 0, at) + 8
        content = bytearray(file.read_bytes())
        content[flags + 1] |= 0x08  # says that names are UTF-8
        file.write_bytes(content)
        with pytest.raises(FormatError, match="is a damaged archive"):
            read_dlrm_datasets(file)

    def test_a_list_of_members_is_sized_before_it_is_read(self, file):
        end = file.read_bytes()[-22:]
        with file.open("r+b") as opened:
            opened.truncate(3 << 30)
            opened.seek(0, os.SEEK_END)
            opened.write(end[:12] + (2 << 30).to_bytes(4, "little") + (1000).to_bytes(4, "little") + end[20:])
        with pytest.raises(FormatError, match="lists its members in more than 16,777,216 bytes"):
            read_dlrm_datasets(file)

    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_code_in_a_pickle_is_named_and_never_run(self, place, tmp_path):
        tensors = list(batch())
        tensors[place] = Malicious(tmp_path / "made")
        torch.save(tuple(tensors), tmp_path / "evil.pt")
        with pytest.raises(FormatError, match="its description calls posix mkdir"):
            read_dlrm_datasets(tmp_path / "evil.pt")
        assert not (tmp_path / "made").exists()

    @pytest.mark.parametrize(
        "program",
        [
            pickle.dumps(Malicious("/tmp/never"), protocol=4),  # the name comes from the stack
            b"\x80\x02cos\nsystem\n.",
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(cbuiltins\neval\nX\x01\x00\x00\x001\x85RttR.",
            b"\x80\x02(X\x02\x00\x00\x00os)\x81.",  # NEWOBJ
            b"\x80\x02ios\nsystem\n.",  # INST without a mark
            b"\x80\x02}(X\x01\x00\x00\x00aK\x01ub.",  # BUILD
            b"\x80\x02\x82\x01.",  # EXT1
            b"\x80\x02Q.",
            b"\x80\x02t.",
            b"\x80\x02(((.",
            b"\x80\x02h\x05.",
            b"\x80\x02r\xff\xff\xff\xff.",  # a memo of four thousand million places
            b"\x80\x02K\x01",
            b"\x80\x02X\xff\xff\xff\x7fshort.",
            b"\x80\x02\xff",
            b"",
        ],
    )
    def test_pickles_of_anything_but_tensors_are_refused(self, program, file, tmp_path):
        with pytest.raises(FormatError) as caught:
            read_dlrm_datasets(rewritten(file, tmp_path / "other.pt", "data.pkl", program))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ({"a": torch.zeros(1)}, "one tuple of plain tensors and nothing else"),
            ((torch.zeros(1), 5, torch.zeros(1)), "a tuple of tensors, and nothing else"),
            (torch.zeros(1), "must hold a tuple"),
            ((torch.arange(2), torch.arange(2)), "must hold indices"),
            ((torch.arange(2), torch.arange(2), torch.arange(2)), "must hold indices .* got 1-dimensional"),
            ((torch.zeros(2), torch.arange(2), torch.ones(1, 1).long()), "must hold whole numbers"),
            ((torch.arange(2).bool(), torch.arange(2), torch.ones(1, 1).long()), "must hold whole numbers or"),
            ((torch.arange(2), torch.arange(2), torch.arange(4).reshape(2, 2).T), "must hold contiguous"),
            ((torch.arange(2), torch.tensor([0, 1]), torch.ones(1, 1).long()), "must have 2 offsets from 0 to the 2"),
            ((torch.arange(2), torch.tensor([0, 2]), torch.zeros(0, 5).long()), "at least one table and one sample"),
            ((torch.arange(2), torch.tensor([0, 1, 2]), torch.tensor([[2, 0]])), "offsets that follow from lengths"),
            ((torch.arange(2) - 1, torch.tensor([0, 2]), torch.tensor([[2]])), "indices of at least 0, table 0 has -1"),
        ],
    )
    def test_other_contents_are_told_apart(self, value, message, tmp_path):
        torch.save(value, tmp_path / "other.pt")
        with pytest.raises(FormatError, match=message):
            read_dlrm_datasets(tmp_path / "other.pt")

    def test_torchs_old_format_is_named(self, tmp_path):
        torch.save(batch(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        with pytest.raises(FormatError, match=r"from before version 1\.6; load it and save it again"):
            read_dlrm_datasets(tmp_path / "old.pt")

    def test_a_storage_that_is_too_small_or_missing(self, file, tmp_path):
        with pytest.raises(FormatError, match="smaller than its tensor"):
            read_dlrm_datasets(rewritten(file, tmp_path / "small.pt", "data/0", b"12345678"))
        with zipfile.ZipFile(file) as old, zipfile.ZipFile(tmp_path / "none.pt", "w") as new:
            for info in old.infolist():
                if not info.filename.endswith("data/1"):
                    new.writestr(info.filename, old.read(info))
        with pytest.raises(FormatError, match='no plain storage "1"'):
            read_dlrm_datasets(tmp_path / "none.pt")

    def test_compressed_members_are_refused_since_nothing_bounds_them(self, file, tmp_path):
        with zipfile.ZipFile(file) as old, zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as new:
            for info in old.infolist():
                new.writestr(info.filename, old.read(info))
        with pytest.raises(FormatError, match=r"must hold a plain .*, got a compressed one"):
            read_dlrm_datasets(tmp_path / "z.pt")

    def test_big_endian_numbers_are_refused(self, file, tmp_path):
        with pytest.raises(FormatError, match="little-endian"):
            read_dlrm_datasets(rewritten(file, tmp_path / "big.pt", "byteorder", b"big"))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "no file that torch.save wrote"),
            (b"hello", "no file that torch.save wrote"),
            (b"PK\x03\x04 and no more", "damaged archive"),
            (b"\x1f\x8b and no more", "damaged gzip file"),
            (gzip.compress(b"hello", mtime=0), "no file that torch.save wrote"),
            (gzip.compress(b"hello" * 100, mtime=0)[:-12], "damaged gzip file"),
        ],
    )
    def test_files_of_other_kinds(self, content, message, tmp_path):
        (tmp_path / "x.pt.gz").write_bytes(content)
        with pytest.raises(FormatError, match=message) as caught:
            import_tables(tmp_path / "x.pt.gz")
        assert str(caught.value).startswith(str(tmp_path / "x.pt.gz"))

    def test_an_archive_of_something_else(self, tmp_path):
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr("a.txt", "hello")
        (tmp_path / "x.pt").write_bytes(content.getvalue())
        with pytest.raises(FormatError, match=r"it has no data\.pkl"):
            read_dlrm_datasets(tmp_path / "x.pt")

    def test_a_cut_archive_at_any_length_is_refused_in_one_line(self, file, tmp_path):
        content = file.read_bytes()
        for length in range(1, len(content), len(content) // 40):
            (tmp_path / "cut.pt").write_bytes(content[:length])
            with pytest.raises(FormatError) as caught:
                read_dlrm_datasets(tmp_path / "cut.pt")
            assert "\n" not in str(caught.value)

    def test_a_missing_file(self, tmp_path):
        with pytest.raises(FormatError, match="cannot be read: no such file"):
            import_tables(tmp_path / "none.pt")
