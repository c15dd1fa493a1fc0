"""The export: encode rows into a token cache, or recreate the damaged files of a finished one with ``--repair``."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import numpy as np
import pyarrow as pa

from packtool import storage
from packtool.cache import hygiene, output_dir
from packtool.cache.executor import Executor, RayExecutor
from packtool.cache.index import prefix_batch, read_index, with_prefix_fields, without_samples
from packtool.cache.local import check_all
from packtool.cache.lock import DirectoryLock, refuse_if_busy
from packtool.cache.manifest import ExportSummary, InputCounts, Manifest, SampleCounts, SourceInfo
from packtool.cache.shard import (
    ADDED_COLUMNS,
    INDEX,
    OLD_PREFIX,
    PREFIX,
    arrow_bytes,
    index_batch,
    index_columns,
)
from packtool.cache.task import MIN_SHARD_ROWS, TASKS_DIR, Report, Task, TaskResult, TaskSettings, make_tasks
from packtool.config.data import ExportConfig
from packtool.constants import DROPPED_NAME, INDEX_NAME, MANIFEST_NAME, MIN_SHARED, PREFIXES_NAME
from packtool.encode.encoder import Encoder, check_template, first_row_error
from packtool.encode.families import default_max_length, media_encoding
from packtool.encode.model_files import ModelFiles
from packtool.encode.prefix_hashes import by_address, by_content, prefix_hashes
from packtool.errors import ConfigError, DataError, MismatchError, StorageError, StoreDownError
from packtool.progress import Progress
from packtool.rows.open_files import close_readers
from packtool.rows.prepared_notes import prepared_notes
from packtool.rows.read import scan_sources
from packtool.rows.sample import unexpected_note
from packtool.rows.source import ScannedSource, SourceSpec
from packtool.rows.sources import sources_of, unread_splits
from packtool.storage import AtomicFile

_NUM_CHECKED = 8  # sources whose first rows are checked before the work begins
_CHUNK_BYTES = 4 * 2**20
_MAX_NOTES = 20  # sources with a note each; of more sources only the progress is shown
_PROGRESS_SOURCES = 20  # sources per step of the progress
_BYTES_PER_ROW = 4096  # more than most rows have


def export(config: ExportConfig, progress: Progress, drops: list[str] | None = None) -> ExportSummary:
    """Encode all rows of all datasets into ``config.output_dir``; raise a PacktoolError if that is impossible.

    ``drops`` receives lines for ``dropped.jsonl`` of a dry run, at most 1,000 of each task; all rows may be dropped.
    """
    if not config.max_length:
        length = default_max_length(ModelFiles.load(config.model, config.chat_template).config)
        config = dataclasses.replace(config, max_length=length)
    # Workers do not start ahead if all tasks may be finished.
    may_be_finished = config.repair or config.is_part
    start_at_rows = sys.maxsize if may_be_finished else 2 * (config.rows_per_shard or MIN_SHARD_ROWS)
    spec, num_proc = config.encode_spec, config.dataset_num_proc
    ray = RayExecutor(spec, num_proc, config.ray_address) if config.executor == "ray" else None
    with ray or Executor(spec, num_proc, start_at_rows) as executor, output_dir.delayed_gc() as enable_gc:
        return _Export(config, progress, executor, drops).run(enable_gc)


def _summary_of_finished(config: ExportConfig, directory: str, manifest: Manifest) -> ExportSummary:
    """Return the summary of a cache that an earlier run or another part has finished; refuse overlaps if required."""
    findings = next(hygiene.read_lines(directory), {}).get("counts", {})
    hygiene.refuse_overlaps(config, findings, storage.join(directory, hygiene.FILE_NAME))
    lengths = np.concatenate([read_index(directory, manifest, split)["length"] for split in manifest.splits])
    values, counts = np.unique(lengths, return_counts=True)
    length = output_dir.percentiles(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    return ExportSummary.of_manifest(
        manifest, length=length, seconds=0.0, output_dir=directory, already_finished=True, hygiene=findings
    )


def _scan(specs: Sequence[SourceSpec], seed: int, progress: Progress, executor: Executor) -> list[ScannedSource]:
    """Scan all sources and announce the rows of each to the executor; show a note for each, or progress if many."""
    if len(specs) > _MAX_NOTES:
        return _scan_many(specs, seed, progress, executor)

    def note(scanned: ScannedSource) -> None:
        executor.expect(scanned.num_rows)
        source = scanned.source
        form = "" if source.form in (None, "messages") else f", {source.form}"  # messages are the usual form
        progress.note(f"{source.label}: {scanned.num_rows:,} rows, {source.size / 1e6:,.1f} MB{form}")

    return scan_sources(specs, seed, note)


def _scan_many(specs: Sequence[SourceSpec], seed: int, progress: Progress, executor: Executor) -> list[ScannedSource]:
    """Scan many sources as ``_scan`` does, with one note about all of them."""
    num_scanned = 0

    def advance(scanned: ScannedSource) -> None:
        nonlocal num_scanned
        executor.expect(scanned.num_rows)
        num_scanned += 1
        if num_scanned % _PROGRESS_SOURCES == 0:  # not for each of many thousand files
            progress.advance(_PROGRESS_SOURCES)

    progress.start("scan files", len(specs))
    sources = scan_sources(specs, seed, advance)
    progress.finish()
    num_rows = sum(scanned.num_rows for scanned in sources)
    num_bytes = sum(max(scanned.source.size, 0) for scanned in sources)  # unknown sizes are -1
    progress.note(f"{len(sources):,} files: {num_rows:,} rows, {num_bytes / 1e6:,.1f} MB")
    return sources


def _likely_rows(spec: SourceSpec) -> int:
    """Estimate a file's rows by its size, so that workers can start before it is scanned; 1 if the size is unknown."""
    num_bytes = os.path.getsize(spec.path) if os.path.isfile(spec.path) else 0
    num_rows = 1 + num_bytes // _BYTES_PER_ROW
    return num_rows if spec.num_sampled is None else min(num_rows, spec.num_sampled)


def _source_info(scanned: ScannedSource) -> SourceInfo:
    source = scanned.source
    path = storage.absolute(source.label)
    return SourceInfo(path, source.size, source.modified, scanned.digest, scanned.num_rows, scanned.spec.settings)


class _Export:
    """An export: scans the sources, runs the tasks (for users, shards) and publishes the cache."""

    def __init__(self, config: ExportConfig, progress: Progress, executor: Executor, drops: list[str] | None) -> None:
        self.config, self.progress, self.executor, self.drops = config, progress, executor, drops
        self.started = time.perf_counter()
        self.files = ModelFiles.load(config.model, config.chat_template, config.chat_template_kwargs)
        self.specs = sources_of(config)
        self.directory = None if config.dry_run else storage.normalize(config.output_dir)
        if self.directory is None or not storage.exists(storage.join(self.directory, MANIFEST_NAME)):
            executor.expect(sum(map(_likely_rows, self.specs)))
        self.media = media_encoding(self.files, config)
        self.identity = output_dir.identity_of(config, self.files, self.media.limits)
        self.encoder = cache(partial(Encoder, config.encode_spec, self.files, self.media))
        self.held_out: hygiene.HeldOut | None = None  # set before the tasks run
        self.findings: dict[str, int] = {}  # numbers of duplicates and overlaps, set after the tasks

    def run(self, enable_gc: Callable[[], None]) -> ExportSummary:
        """Run the export unless its cache is finished; ``enable_gc`` is called after the scan."""
        directory = self.directory
        if directory is None:  # --dry-run
            self._prepare(enable_gc)
            return self._count()
        # Errors and finished caches are noticed before the sources are read, which may take minutes.
        manifest = self._find_finished(directory)
        if manifest is not None:
            return _summary_of_finished(self.config, directory, manifest)
        output_dir.check_is_ours(directory, may_be_finished=self.config.overwrite or self.config.repair)
        refuse_if_busy(directory, is_part=self.config.is_part)
        self._prepare(enable_gc)
        with DirectoryLock(directory, self._lock_part()) as lock:
            if self.config.repair:
                return self._repair(directory, lock)
            manifest = self._find_finished(directory)
            if manifest is not None:  # another export has finished while the sources were read
                return _summary_of_finished(self.config, directory, manifest)
            return self._write(directory, lock)

    def _find_finished(self, directory: str) -> Manifest | None:
        """Return the manifest of this export's finished cache; None if there is none, or if its files are replaced."""
        if self.config.overwrite or self.config.repair:
            return None
        return output_dir.find_finished(directory, self.identity, self.specs)

    def _lock_part(self) -> str:
        """Return the part of the job array for the lock, whose parts hold theirs together; "" excludes all others."""
        config = self.config
        if not config.is_part:
            return ""
        return "--finalize" if config.task_index is None else f"{config.task_index} of {config.num_tasks}"

    def _prepare(self, enable_gc: Callable[[], None]) -> None:
        """Check the encoder, print warnings, make the tasks, and wait until the workers have loaded the tokenizer."""
        if not self.executor.has_started:
            self.encoder()  # raises for unsupported models; workers that have started raise the same error
        for warning in (*self.media.warnings, *self.files.option_warnings(self.config.encode_spec)):
            self.progress.note(warning)
        self._make_tasks()
        if self.config.check_against:
            self.held_out = hygiene.read_held_out(self.config, self.files, self.media, self.progress)
        enable_gc()
        self.executor.check_ready(wait_s=None)

    def _make_tasks(self) -> None:
        """Scan the files of rows, print notes about them, and divide their rows into tasks.

        Sets ``sources`` (what the manifest records of the files), ``tasks``, and ``has_parts`` (rows may become several
        samples). DataError if there are no rows.
        """
        config = self.config
        scanned_sources = _scan(self.specs, config.seed, self.progress, self.executor)
        self.sources = tuple(_source_info(scanned) for scanned in scanned_sources)
        for note in (*unread_splits(config), *prepared_notes(scanned_sources, takes_tokens=config.TAKES_TOKENS)):
            self.progress.note(note)
        check_template(config.model, self.files, ((scanned.source, scanned.blocks) for scanned in scanned_sources))
        self.tasks = make_tasks(scanned_sources, config)
        if not self.tasks:
            raise DataError(f"no rows in {', '.join(config.dataset)}")
        self._warn_of_refused_media(scanned_sources)
        close_readers()  # of this process; each worker opens its own
        # Rows become several samples (parts) if each of their turns becomes a sample, or each of several responses.
        expands_turns = "expand_turns" in self.identity.spec  # recorded only if it is true
        used_columns = (dict(source.columns) for task in self.tasks for source, _ in task.row_blocks)
        self.has_parts = expands_turns or any("responses" in columns for columns in used_columns)

    def _warn_of_refused_media(self, scanned_sources: Sequence[ScannedSource]) -> None:
        """Print a note about the first source whose rows name media which they may not access."""
        for scanned in scanned_sources[:_NUM_CHECKED]:
            warning = first_row_error(scanned.source, scanned.blocks)
            if warning:
                self.progress.note(warning)
                return

    def _task_settings(
        self, directory: str | None, export: str = "", lock: DirectoryLock | None = None
    ) -> TaskSettings:
        return TaskSettings(
            spec=self.config.encode_spec,
            directory=directory,
            strict=self.config.strict,
            has_parts=self.has_parts,
            export=export,
            holds_lock=None if lock is None else lock.is_held,
            held_out=self.held_out,
            finds_near_duplicates=self.config.near_duplicates is not None,
        )

    def _count(self) -> ExportSummary:
        """Encode all rows and write nothing (``--dry-run``); return the counts of the cache that would be written."""
        results_by_task = self._run_tasks(self.tasks, {}, self._task_settings(directory=None), lambda: None)
        results = [results_by_task[task.number] for task in self.tasks]
        results, self.findings = output_dir.compare_rows(None, results, self.held_out, self.config)
        manifest = output_dir.build_manifest(self.identity, self.sources, results)
        if self.drops is None:
            output_dir.refuse_empty(manifest, results, None)
        else:
            self.drops.extend(line for result in results for line in result.drops)
        return self._summary(manifest, results, {}, f"{DROPPED_NAME} of a run without --dry-run")

    def _write(self, directory: str, lock: DirectoryLock) -> ExportSummary:
        """Encode the rows of an export, and publish the cache when all tasks are finished.

        A task encodes some of the rows and writes them to its own files. In a job array, several runs ("parts") share
        the tasks of one export. Each part runs its own tasks, and a part that finds all tasks finished publishes the
        cache.

        Returns:
            The summary of the cache, or of this part if tasks of other parts are still missing.
        """
        reused_results, export_id = self._begin(directory)  # results of an interrupted earlier run, by task number
        settings = self._task_settings(directory, export_id, lock)
        results = self._run_tasks(self.tasks, reused_results, settings, lock.check_last_renewal)
        if self.config.is_part:
            results = output_dir.finished_tasks(directory, export_id)  # of all parts

        missing_tasks = [task.number for task in self.tasks if task.number not in results]
        if missing_tasks:
            # Publishing removes the results of tasks: perhaps another part has just published the cache.
            published_summary = self._summary_of_published(directory)
            return published_summary or self._unfinished_summary(results, reused_results, missing_tasks)

        results_in_order = [results[task.number] for task in self.tasks]
        try:
            return self._publish(directory, lock, results_in_order, reused_results)
        except (StorageError, MismatchError):
            # Another part may have published the same cache meanwhile: that is no failure.
            published_summary = self._summary_of_published(directory)
            if published_summary is None:
                raise
            return published_summary

    def _begin(self, directory: str) -> tuple[dict[int, TaskResult], str]:
        """Prepare the directory; return the results that an interrupted run has left, and the export's identifier."""
        if self.config.overwrite:
            output_dir.clear(directory)  # only now, so that wrong settings do not destroy the old cache
        state = output_dir.export_state(self.identity, self.sources)
        splits = {split for task in self.tasks for split in task.shards}
        return output_dir.begin(directory, state, splits, is_part=self.config.is_part), output_dir.export_id(state)

    def _summary_of_published(self, directory: str) -> ExportSummary | None:
        """Return the summary of the cache if another part of the job array has published it meanwhile, else None.

        This part then has no results of tasks, or fails when it publishes the same cache.
        """
        if not self.config.is_part:
            return None
        manifest = output_dir.read_published(directory, self.identity, self.sources)
        return None if manifest is None else _summary_of_finished(self.config, directory, manifest)

    def _publish(
        self, directory: str, lock: DirectoryLock, results: Sequence[TaskResult], reused: Mapping[int, TaskResult]
    ) -> ExportSummary:
        """Compare the rows of all tasks, and publish the cache of those that are kept."""
        results, self.findings = output_dir.compare_rows(directory, results, self.held_out, self.config, lock.check)
        manifest = output_dir.build_manifest(self.identity, self.sources, results)
        output_dir.refuse_empty(manifest, results, directory)
        output_dir.publish_cache(directory, manifest, results, lock.check, self.has_parts)
        return self._summary(manifest, results, reused, storage.join(directory, DROPPED_NAME))

    def _unfinished_summary(
        self, results: Mapping[int, TaskResult], reused: Mapping[int, TaskResult], missing: Sequence[int]
    ) -> ExportSummary:
        """Return the summary of a part of a job array while other tasks are missing; DataError with ``--finalize``."""
        if self.config.finalize:
            raise self._missing_shards_error(missing)
        own_results = [result for number, result in results.items() if self._is_own_task(number)]
        sample_counts = SampleCounts.total(split.counts for result in own_results for split in result.splits.values())
        return ExportSummary.of(
            InputCounts.total(result.counts for result in own_results),
            sample_counts,
            num_samples_by_split={},  # known when the cache is finished
            length=output_dir.percentiles(output_dir.length_counts(own_results)),
            seconds=time.perf_counter() - self.started,
            output_dir=self.config.output_dir,
            num_missing_shards=len(missing),
            rows_made=sum(result.counts.rows for result in own_results if result.number not in reused),
        )

    def _missing_shards_error(self, missing: Sequence[int]) -> DataError:
        shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        return DataError(
            f"{self.config.output_dir} cannot be finished: {len(missing)} of {len(self.tasks)} shards are missing "
            f"({shown})",
            "Run the missing parts: --task-index n of --num-tasks N makes the shards whose number modulo N is n.",
            code="D008",
        )

    def _repair(self, directory: str, lock: DirectoryLock) -> ExportSummary:
        manifest = output_dir.find_same(directory, self.identity, self.specs)
        if manifest is None:
            message = f"--repair: {directory} holds no finished cache"
            raise ConfigError(message, "Leave out --repair: the export then resumes or starts.")
        damaged = [file for file, problem, _ in check_all(directory, manifest) if problem]
        for file in damaged:
            self.progress.note(f"{file} is damaged and will be recreated")
        if damaged:
            self._recreate(directory, lock, manifest, damaged)
        return _summary_of_finished(self.config, directory, manifest)

    def _recreate(self, directory: str, lock: DirectoryLock, manifest: Manifest, damaged: Sequence[str]) -> None:
        """Recreate the damaged files of a cache, given by paths such as ``train/index.arrow``.

        Tasks with a damaged shard run again in a temporary directory, which gives the same bytes, and the shard is
        copied to the cache; damaged indexes and prefixes are then rebuilt from the shards. Raises a MismatchError if a
        recreated file differs from the original, by its SHA-256 in the manifest.
        """
        scratch = storage.join(directory, TASKS_DIR, "repair")
        storage.remove(scratch)
        try:
            for name in (TASKS_DIR, *manifest.splits):
                storage.make_directory(storage.join(scratch, name))
            recreated_sha256 = self._recreate_shards(scratch, lock, damaged)
            for split, info in manifest.splits.items():
                for shard in info.shards:
                    file = f"{split}/{shard.file}"
                    if file in damaged:
                        if recreated_sha256.get(file) != shard.sha256:
                            raise _differs_error(directory, file)
                        _copy(storage.join(scratch, file), storage.join(directory, file))
                # These are rebuilt from the shards.
                if f"{split}/{INDEX_NAME}" in damaged:
                    _rebuild_index(directory, manifest, split)
                if f"{split}/{PREFIXES_NAME}" in damaged:
                    _rebuild_prefixes(directory, manifest, split, self.encoder())
        finally:
            storage.remove(storage.join(directory, TASKS_DIR))  # ``scratch`` is in it

    def _recreate_shards(self, scratch: str, lock: DirectoryLock, damaged: Sequence[str]) -> dict[str, str]:
        """Write the shards of the tasks that have damaged ones to ``scratch``; return the SHA-256 of each by path."""
        damaged_tasks = [task for task in self.tasks if not task.shard_files.isdisjoint(damaged)]
        if not damaged_tasks:
            return {}
        settings = self._task_settings(scratch, lock=lock)
        results = self._run_tasks(damaged_tasks, {}, settings, lock.check_last_renewal).values()
        return {f"{split}/{shard.file}": shard.sha256 for result in results for split, shard in result.splits.items()}

    def _summary(
        self, manifest: Manifest, results: Sequence[TaskResult], reused: Mapping[int, TaskResult], dropped_file: str
    ) -> ExportSummary:
        """Return the counts of this run, after a note about errors in rows that point to a bug in packtool."""
        if note := unexpected_note(manifest.dropped, dropped_file):
            self.progress.note(note)
        return ExportSummary.of_manifest(
            manifest,
            length=output_dir.percentiles(output_dir.length_counts(results)),
            seconds=time.perf_counter() - self.started,
            output_dir=self.config.output_dir,
            num_reused=len(reused),
            rows_made=sum(result.counts.rows for result in results if result.number not in reused),
            hygiene=self.findings,
        )

    def _run_tasks(
        self,
        tasks: Sequence[Task],
        reused: Mapping[int, TaskResult],
        settings: TaskSettings,
        check_lock: Callable[[], None],
    ) -> dict[int, TaskResult]:
        """Run the unfinished tasks of this run; return their results together with ``reused``, by task number."""
        unfinished: list[Task] = []
        if not self.config.finalize:  # --finalize publishes the cache of the other parts and encodes nothing itself
            unfinished = [task for task in tasks if self._is_own_task(task.number) and task.number not in reused]
        if reused:
            self.progress.note(f"{len(reused)} of {len(tasks)} shards were finished by an earlier run")
        self.progress.start("export", sum(task.num_rows for task in unfinished))
        report = _progress_report(self.progress, check_lock)
        results = dict(reused)
        try:
            for result in self.executor.run(unfinished, settings, self.encoder, report):
                results[result.number] = result
        except StoreDownError as error:
            if settings.directory is None:  # a dry run has no shards to resume after
                raise
            raise error.with_resume_advice("Finished shards are kept: run the same command again to resume.") from error
        self.progress.finish()
        return results

    def _is_own_task(self, task_number: int) -> bool:
        """Return whether this run makes a task: part n of N in a job array makes those whose number modulo N is n."""
        config = self.config
        return not config.is_part or task_number % (config.num_tasks or 1) == config.task_index


def _progress_report(progress: Progress, check_lock: Callable[[], None]) -> Report:
    """Return a function that checks the lock, adds up the counts of its calls, and shows the totals."""
    begin_time = time.perf_counter()
    num_dropped = num_tokens = 0

    def report(rows: int, dropped: int, tokens: int) -> None:
        """Show progress; the arguments count what was encoded since the last call."""
        nonlocal num_dropped, num_tokens
        check_lock()
        num_dropped += dropped
        num_tokens += tokens
        seconds = max(time.perf_counter() - begin_time, 1e-9)
        progress.advance(rows, dropped=num_dropped, tokens=num_tokens, tokens_per_s=round(num_tokens / seconds))

    return report


def _copy(path: str, target_path: str) -> None:
    """Replace a file of the cache by a copy of another one."""
    with storage.open_read(path) as source, AtomicFile(target_path) as target:
        shutil.copyfileobj(source, target, _CHUNK_BYTES)


def _differs_error(directory: str, file: str) -> MismatchError:
    return MismatchError(
        f"{storage.join(directory, file)}: the recreated file differs from the original, perhaps because another "
        "version of a library makes other tokens",
        "Export into another --output-dir; --overwrite instead of --repair would delete this cache first.",
    )


def _rebuild_index(directory: str, manifest: Manifest, split: str) -> None:
    """Write ``index.arrow`` again from the shards of a split; raise a MismatchError if it differs from the original."""
    info = manifest.splits[split]
    channel_codes = {name: code for code, name in enumerate(manifest.channels)}
    batches = [
        without_samples(index_batch(index_columns(samples, number, 0, channel_codes)), left_out)
        for number, (samples, left_out) in enumerate(hygiene.shard_samples(directory, manifest, split))
    ]
    # Older caches have fewer columns.
    for missing in ((), ADDED_COLUMNS[-1:], ADDED_COLUMNS):
        schema = pa.schema([field for field in INDEX if field.name not in missing])
        data = arrow_bytes([batch.select(schema.names) for batch in batches], schema)
        if info.index_sha256 in ("", hashlib.sha256(data).hexdigest()):
            storage.publish(storage.join(directory, split, INDEX_NAME), data)
            return
    raise _differs_error(directory, f"{split}/{INDEX_NAME}")


def _rebuild_prefixes(directory: str, manifest: Manifest, split: str, encoder: Encoder) -> None:
    """Write ``prefixes.arrow`` again from the shards of a split; raise a MismatchError if it cannot be the original."""
    path = storage.join(directory, split, PREFIXES_NAME)
    original_sha256 = manifest.splits[split].prefixes_sha256
    # Older caches hash the addresses of media instead of their contents, or have fewer fields (``OLD_PREFIX``).
    for medium_key in (by_content, by_address):
        batches = []
        for samples, left_out in hygiene.shard_samples(directory, manifest, split):
            if samples:
                num_prefixes, prefixes = prefix_hashes(
                    samples, encoder.media_tokens, longer_than=MIN_SHARED, medium_key=medium_key
                )
                batches.append(without_samples(prefix_batch(num_prefixes, prefixes), left_out))
        for prefix_type in (PREFIX, OLD_PREFIX):
            schema = pa.schema([("prefixes", pa.list_(prefix_type))])
            data = arrow_bytes([with_prefix_fields(batch, prefix_type) for batch in batches], schema)
            if hashlib.sha256(data).hexdigest() == original_sha256:
                storage.publish(path, data)
                return
    raise MismatchError(
        f"{path} cannot be recreated: packtool {manifest.packtool_version} wrote it, and older "
        "versions computed other hashes for rows with a channel or a long system prompt; or media files have changed "
        "since the export",
        "The samples themselves are intact: train with --share-prefix false, which does not read this file; or "
        "export into another --output-dir. --overwrite instead of --repair would delete this cache first.",
    )
