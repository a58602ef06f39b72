"""All the real files: each dataset on the right road with the right values, or refused by name and cause."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import DataError
from hpctrain.h5.dataset import open_dataset
from hpctrain.h5.survey import survey
from tests.support import ROOT

FOLDER = ROOT.parent / "shared" / "data" / "hdf5-files"
CHILD_DEADLINE_S = 90

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the real files are not in {FOLDER}")


@dataclass(frozen=True)
class Expected:
    """What must come out of a file.

    `parallel` and `libhdf5` count datasets by road; `why` are parts of the reasons that must all occur for libhdf5.
    `bad` maps damaged or unreadable objects to a part of the cause; `refused` is a part of the message about the file.
    `unread` counts datasets that are described although nothing can read them. `links` are not followed.
    """

    parallel: int = 0
    libhdf5: int = 0
    why: tuple[str, ...] = ()
    bad: Mapping[str, str] = field(default_factory=dict)
    unread: int = 0
    refused: str = ""
    links: Mapping[str, str] = field(default_factory=dict)


SCALARS, VLEN, COMPACT = "a single value without rows", "variable-length", "compact layout"
TIME = "No NumPy equivalent for TypeTimeID"

KILLER = "HDFGroup-cve_hdf5__cve-2024-32609.h5"

FILES = {
    "HDFGroup-cve_hdf5__cve-2018-11202.h5": Expected(
        bad={"/Compressed_Data": "number of dimensions cannot be zero"}
    ),
    "HDFGroup-cve_hdf5__cve-2018-13874.h5": Expected(refused="truncated"),
    "HDFGroup-cve_hdf5__cve-2018-17435.h5": Expected(2, bad={"/image": "ran off end of input buffer"}),
    "HDFGroup-cve_hdf5__cve-2020-10812.h5": Expected(refused="address plus size exceeds file eoa"),
    "HDFGroup-hdf5-examples__h5ex_d_bzip2.h5": Expected(libhdf5=1, why=("bzip2",)),
    "HDFGroup-hdf5-examples__h5ex_d_jpeg.h5": Expected(unread=1, bad={"/DS1": "32019"}),
    "HDFGroup-hdf5-examples__h5ex_d_zstd.h5": Expected(1),
    "HDFGroup-hdf5-json__bool_dset.h5": Expected(1),
    "HDFGroup-hdf5-json__h5ex_d_extern.h5": Expected(
        unread=1, bad={"/DS1": "h5ex_d_extern.data' is not there"}
    ),
    "HDFGroup-hdf5-json__h5ex_d_nbit.h5": Expected(libhdf5=1, why=("16 of 32 bits",)),
    "HDFGroup-hdf5-json__tall_with_udlink.h5": Expected(
        4,
        links={"/g1/g1.2/extlink": "external", "/g1/g1.2/g1.2.1/slink": "soft", "/g2/udlink": "user-defined"},
    ),
    "HDFGroup-hdf5_plugins__test_zfp_be.h5": Expected(1, 1, ("ZFP",)),
    "JuliaIO-MAT.jl__partial.mat.h5": Expected(2),
    "JuliaIO-MAT.jl__simple.mat.h5": Expected(libhdf5=11, why=(COMPACT,)),
    "JuliaIO-MAT.jl__sparse.mat.h5": Expected(libhdf5=14, why=(COMPACT,)),
    "NCAS-CMS-pyfive__btreev2.hdf5.h5": Expected(2),
    "NCAS-CMS-pyfive__chunked.hdf5.h5": Expected(1),
    "NCAS-CMS-pyfive__compact.hdf5.h5": Expected(libhdf5=1, why=(COMPACT,)),
    "NCAS-CMS-pyfive__compressed_v1.hdf5.h5": Expected(1),
    "NCAS-CMS-pyfive__enum_h5variable.hdf5.h5": Expected(1),
    "NCAS-CMS-pyfive__noy_AERmonZ_UKESM1-0-LL_piControl_r1i1p1f2_gnz_200001-200012.nc.h5": Expected(7),
    "NCAS-CMS-pyfive__opaque_datetime.hdf5.h5": Expected(2, 1, (VLEN,)),
    "NCAS-CMS-pyfive__references.hdf5.h5": Expected(1, 4, ("references",)),
    "NeurodataWithoutBorders-pynwb__2.1.0_nwbfile_with_extension.nwb.h5": Expected(1, 28, (SCALARS, VLEN)),
    "PyTables-PyTables__Tables_lzo2_shuffle.h5": Expected(
        unread=3, bad=dict.fromkeys(("/tuple0", "/group0/tuple1", "/group0/group1/tuple2"), "305")
    ),
    "PyTables-PyTables__blosc_bigendian.h5": Expected(4),
    "PyTables-PyTables__smpl_compound_chunked.h5": Expected(1),
    "PyTables-PyTables__test_szip.h5": Expected(1),
    "PyTables-PyTables__times-nested-be.h5": Expected(
        unread=3, bad=dict.fromkeys(("/earr32", "/earr64", "/tbl"), TIME)
    ),
    "Unidata-netcdf-c__ref_tst_dims.nc.h5": Expected(1),
    "aiqm-torchani__c6.h5": Expected(3),
    "fsspec-kerchunk__NEONDSTowerTemperatureData.hdf5.h5": Expected(16),
    "fsspec-kerchunk__air.nc.h5": Expected(4),
    "fsspec-kerchunk__hdf5_mini_shuffle_blosc.h5": Expected(1),
    "gauteh-hidefix__feb.nc4.h5": Expected(5),
    "h5py-h5py__compound-dtype-complex.h5": Expected(6),
    "h5py-h5py__vlen_string_s390x.h5": Expected(4, 1, (VLEN,)),
    "hoene-libmysofa__fail-issue-132.sofa.h5": Expected(bad={"/": "incorrect metadata checksum"}),
    "hoene-libmysofa__fail-issue-163.sofa.h5": Expected(refused="truncated"),
    "jamesmudd-jhdf__bitfield_datasets.hdf5.h5": Expected(4, 1, (SCALARS,)),
    "jamesmudd-jhdf__bitshuffle_datasets.hdf5.h5": Expected(40),
    "jamesmudd-jhdf__compound_datasets_latest.hdf5.h5": Expected(4, 6, (VLEN,)),
    "jamesmudd-jhdf__external_link.hdf5.h5": Expected(
        links={"/root_dot": "external", "/root_slash": "external"}
    ),
    "jamesmudd-jhdf__implicit_index_datasets.hdf5.h5": Expected(2),
    "jamesmudd-jhdf__lz4_datasets.hdf5.h5": Expected(20),
    "jamesmudd-jhdf__test_byteshuffle_compressed_datasets_latest.hdf5.h5": Expected(refused="h5clear"),
    "jamesmudd-jhdf__test_compressed_chunked_datasets_latest.hdf5.h5": Expected(10),
    "jamesmudd-jhdf__test_userblock_latest.hdf5.h5": Expected(),
    "jamesmudd-jhdf__test_vlen_datasets_latest.hdf5.h5": Expected(libhdf5=22, why=(VLEN,)),
    "jamesmudd-jhdf__tiny_huge_1d_over_maxint.hdf5.h5": Expected(1),
    "kiyo-masui-bitshuffle__regression_0.4.0.h5": Expected(63),
    "nipy-nibabel__minc2_1_scale.mnc.h5": Expected(1, 8, (SCALARS,)),
    "nipy-nibabel__minc2_4d.mnc.h5": Expected(4, 4, (SCALARS,)),
    "nipy-nibabel__small.mnc.h5": Expected(3, 3, (SCALARS,)),
    "oarriaga-face_classification__fer2013_mini_XCEPTION.102-0.66.hdf5.h5": Expected(184, 1, (SCALARS,)),
    "openPMD-openPMD-example-datasets__example-femm-thetaMode.h5": Expected(2),
    "scverse-anndata__adata.h5ad.h5": Expected(32),
    "scverse-anndata__v0.7.8_adata.h5ad.h5": Expected(61, 22, (SCALARS, VLEN)),
    "scverse-scanpy__raw_probe_bc_matrix.h5": Expected(15),
    "silx-kit-hdf5plugin__bitshuffle.h5": Expected(1),
    "silx-kit-hdf5plugin__blosc.h5": Expected(1),
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """What `tests.h5.real_files` says about each file: two processes for all of them."""
    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(examined, (list(FILES)[::2], list(FILES)[1::2]))
    return {name: found for part in parts for name, found in part.items()}


def examined(names: list[str]) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.h5.real_files"],
        input=json.dumps([str(FOLDER / name) for name in names]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=CHILD_DEADLINE_S,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"it ended at {lines[-1:]}: {done.stderr}"
    return {Path(name).name: json.loads(found) for name, found in zip(lines[::2], lines[1::2], strict=True)}


def test_the_table_is_about_the_files_there_are() -> None:
    assert {path.name for path in FOLDER.glob("*.h5")} == {*FILES, KILLER}
    assert len(FILES) == 61


@pytest.mark.parametrize("name", FILES)
def test_roads_reasons_and_damage(name: str, results: dict[str, dict[str, Any]]) -> None:
    expected, found = FILES[name], results[name]
    assert Counter(found["roads"].values()) == Counter(
        parallel=expected.parallel, libhdf5=expected.libhdf5, none=expected.unread
    ), found["reasons"]
    assert all(found["reasons"].get(item) for item, road in found["roads"].items() if road != "parallel")
    for part in expected.why:
        assert any(part in reason for reason in found["reasons"].values()), found["reasons"]
    causes = dict(found["findings"])
    assert causes.keys() == expected.bad.keys(), causes
    for item, part in expected.bad.items():
        assert part in causes[item]
    assert expected.refused in found["refused"]
    assert bool(expected.refused) == bool(found["refused"]), found["refused"]
    assert dict(found["links"]).items() == expected.links.items()


@pytest.mark.parametrize("name", FILES)
def test_values_are_those_of_h5py(name: str, results: dict[str, dict[str, Any]]) -> None:
    compared = results[name]["compared"]
    assert len(compared) == FILES[name].parallel + FILES[name].libhdf5
    assert set(compared.values()) <= {"equal"}, {
        item: words for item, words in compared.items() if words != "equal"
    }


@pytest.mark.parametrize(
    ("file", "dataset", "absent"),
    [
        ("HDFGroup-hdf5-json__h5ex_d_extern.h5", "/DS1", "h5ex_d_extern.data"),
        ("jamesmudd-jhdf__external_link.hdf5.h5", "/root_slash", "test_file.hdf5"),
        ("HDFGroup-hdf5-json__tall_with_udlink.h5", "/g1/g1.2/extlink", "somefile"),
    ],
)
def test_what_lies_in_a_file_that_is_not_there_is_an_error(file: str, dataset: str, absent: str) -> None:
    with pytest.raises(DataError, match=absent) as raised:
        open_dataset(FOLDER / file, dataset)
    assert file in str(raised.value)


def test_the_file_that_brings_libhdf5_down_is_told_by_the_object() -> None:
    found = survey(FOLDER / KILLER)
    assert [(item.name, item.cause) for item in found.findings] == [
        ("/int/uint", "libhdf5 crashes on it (SIGSEGV)")
    ]
    assert found.num_groups == 3
    assert not found.refused
