"""HDF5 without MPI or torch: filters, chunk index, reader, writer and packing.

Nothing is imported here, so that a verb which only needs part of it loads only that part:

* `packed`: `open_packed`, `PackedSet`, `Field`, `Shard`; `index`: `ChunkIndex`, `read_index`;
* `reader`: `read_sample_chunk`, `FileSource`, `ChunkSource`, `Ragged`;
* `pack`: `pack`, `pack_path`, `pack_arrays`, `PackOptions`, `SourceOptions`, `PackReport`;
* `filters`: `FilterPipeline`; `codecs`: `pipeline_for`, `CODECS`.
"""
