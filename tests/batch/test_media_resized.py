"""Pixels by way of a media cache: the same to the last bit, and never those of a file that has changed."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from packtool.batch.media import load_pixels
from packtool.batch.media_cache import MediaCache, MediaReads
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader
from packtool.config.data import MediaCacheOptions
from packtool.encode.encoded import EncodedSample
from packtool.encode.families import MediaLimits
from packtool.errors import ConfigError, MediaError
from packtool.media import files
from packtool.media.files import content_state
from packtool.rows.media_policy import MediaPolicy
from tests.batch.reduced import LIKE_VISION_MODELS, VISION_MODELS, make_picture, make_sample, reduced_spec
from tests.train.tiny_media import export_kinds, make_media_world


@pytest.fixture(autouse=True)
def _files_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SETTLED_SECONDS", -1.0)


def write_processor(directory: Path, name: str) -> str:
    limits = reduced_spec(name).limits.image
    assert limits is not None
    kind = "Glm4vImageProcessor" if name == "glm4v" else "Qwen2VLImageProcessor"
    sizes = {"patch_size": limits.patch_size, "merge_size": limits.merge_size, "temporal_patch_size": 2}
    size = {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
    (directory / "preprocessor_config.json").write_text(
        json.dumps(sizes | {"size": size, "image_processor_type": kind})
    )
    return str(directory)


def kept_in(directory: Path, spec: InputSpec) -> InputSpec:
    options = MediaCacheOptions(media_cache=str(directory / "kept"), media_cache_size=10**8)
    return spec.with_media_cache(options, "rows")


def take_reads(spec: InputSpec) -> MediaReads:
    assert spec.media_cache is not None
    return spec.media_cache.take_reads()


def check_same(samples: list[EncodedSample], plain: InputSpec, cached: InputSpec) -> None:
    expected, pixels = load_pixels(samples, plain), load_pixels(samples, cached)
    assert expected.keys() == pixels.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == pixels[name].dtype
        assert torch.equal(tensor, pixels[name]), name


@pytest.mark.parametrize("name", [*VISION_MODELS, *LIKE_VISION_MODELS])
def test_images_of_every_family_are_cached(name: str, tmp_path: Path) -> None:
    spec = reduced_spec(name, write_processor(tmp_path, name))
    limits = spec.limits.image
    assert limits is not None
    if spec.family.keeps_bounds:  # of both frames of a patch
        both = dataclasses.replace(limits, min_pixels=2 * limits.min_pixels, max_pixels=2 * limits.max_pixels)
        spec = dataclasses.replace(spec, limits=MediaLimits(both))
    cached_spec = kept_in(tmp_path, spec)
    samples = [
        make_sample(4, ((40, 64), (33, 90)), seed=1, limits=limits),
        make_sample(4, ((64, 40),), seed=2, limits=limits),
    ]
    check_same(samples, spec, cached_spec)
    assert take_reads(cached_spec) == MediaReads(hits=0, misses=3)
    check_same(samples, spec, cached_spec)
    check_same(samples[:1], spec, cached_spec)
    assert take_reads(cached_spec) == MediaReads(hits=5, misses=0)


@pytest.mark.parametrize("hears", [False, True])
def test_videos_and_clips_are_cached(hears: bool, tmp_path: Path) -> None:
    tiny = make_media_world(tmp_path, hears=hears)
    reader = CacheReader.open([export_kinds(tiny, tiny.cache, [("picture", "video"), ("video",)]).cache])
    spec = InputSpec.load(tiny.model, reader.manifests[0].identity.media_limits)
    cached_spec = kept_in(tmp_path, spec)
    sample = reader.sample(0)
    (video,) = sample.videos
    assert len(video.indices) == 4
    clip = dataclasses.replace(video, indices=(1, 4, 5, 9))
    pictures = [(None, make_picture(video.width, video.height, seed)) for seed in range(4)]
    of_pictures = dataclasses.replace(video, path=None, frames=tuple(pictures), indices=(0, 1, 2, 3))
    samples = [dataclasses.replace(sample, videos=(video, clip, of_pictures, video)), reader.sample(1)]
    check_same(samples, spec, cached_spec)
    assert take_reads(cached_spec) == MediaReads(hits=2, misses=4)
    check_same(samples, spec, cached_spec)
    assert take_reads(cached_spec) == MediaReads(hits=6, misses=0)


def picture_on_disk(tmp_path: Path, spec: InputSpec) -> tuple[Path, EncodedSample]:
    sample = make_sample(4, ((40, 64),), seed=1, limits=spec.limits.image)
    path = tmp_path / "a.png"
    path.write_bytes(sample.images[0].data or b"")
    image = dataclasses.replace(sample.images[0], path=str(path), data=None)
    return path, dataclasses.replace(sample, images=(image,))


@pytest.fixture
def world(tmp_path: Path) -> tuple[InputSpec, InputSpec]:
    spec = reduced_spec("qwen3_vl", write_processor(tmp_path, "qwen3_vl"))
    return spec, kept_in(tmp_path, spec)


@pytest.mark.parametrize("replacement", ["written", "replaced", "times kept"])
def test_changed_file_gives_new_pixels(replacement: str, world: tuple[InputSpec, InputSpec], tmp_path: Path) -> None:
    spec, cached_spec = world
    path, sample = picture_on_disk(tmp_path, spec)
    check_same([sample], spec, cached_spec)
    before, other = path.stat(), make_picture(40, 64, seed=5)
    other += bytes(max(before.st_size - len(other), 0))
    if replacement == "replaced":
        (tmp_path / "b.png").write_bytes(other)
        os.utime(tmp_path / "b.png", ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(tmp_path / "b.png", path)
    else:
        path.write_bytes(other)
        if replacement == "times kept":
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    check_same([sample], spec, cached_spec)
    assert take_reads(cached_spec) == MediaReads(hits=0, misses=2)
    path.write_bytes(make_picture(400, 64, seed=5))
    with pytest.raises(MediaError, match="has changed since the export"):
        load_pixels([sample], cached_spec)
    path.unlink()
    with pytest.raises(MediaError, match="there is no such file"):
        load_pixels([sample], cached_spec)


def test_recent_files_are_not_cached_and_oversized_entries_are_refused(
    world: tuple[InputSpec, InputSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, cached_spec = world
    _, sample = picture_on_disk(tmp_path, spec)
    with monkeypatch.context() as patched:
        patched.setattr(files, "SETTLED_SECONDS", 1000.0)
        check_same([sample], spec, cached_spec)
        check_same([sample], spec, cached_spec)
        assert take_reads(cached_spec) == MediaReads(hits=0, misses=2)
    check_same([sample], spec, cached_spec)
    check_same([sample], spec, cached_spec)
    assert take_reads(cached_spec) == MediaReads(hits=1, misses=1)
    forbidden = dataclasses.replace(cached_spec, media_policy=MediaPolicy(max_bytes=10))
    with pytest.raises(MediaError, match="--max-media-bytes"):
        load_pixels([sample], forbidden)


def test_file_changed_during_decoding_is_not_cached(
    world: tuple[InputSpec, InputSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, cached_spec = world
    _, sample = picture_on_disk(tmp_path, spec)
    answers = iter(["one", "another"])
    monkeypatch.setattr("packtool.batch.media.content_state", lambda *_, **__: next(answers))
    load_pixels([sample], cached_spec)
    assert not list((tmp_path / "kept" / "entries").iterdir())


class Tagged(BaseHTTPRequestHandler):
    """Answers with a tag and without, and with a part of ten bytes."""

    def do_GET(self) -> None:
        self.send_response(206)
        self.send_header("Content-Range", "bytes 0-0/10")
        self.send_header("Content-Length", "1")
        if self.path == "/tagged":
            self.send_header("ETag", '"abc"')
        self.end_headers()
        self.wfile.write(b"x")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Tagged)
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


def test_remote_files_are_identified_by_etag(server: str, tmp_path: Path) -> None:
    policy = MediaPolicy()
    assert content_state(f"{server}/tagged", None, policy, is_image=True) == f"{server}/tagged 10 abc"
    assert content_state(f"{server}/plain", None, policy, is_image=True) is None
    refused = MediaPolicy(stores=frozenset())
    assert content_state(f"{server}/tagged", None, refused, is_image=True) is None
    assert content_state(str(tmp_path), None, policy, is_image=True) is None
    assert content_state("nowhere://x", None, policy, is_image=True) is None
    assert content_state("a.png", b"1", policy, is_image=True) != content_state("a.png", b"2", policy, is_image=True)


def test_file_as_cache_folder_is_refused(world: tuple[InputSpec, InputSpec], tmp_path: Path) -> None:
    spec, _ = world
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        spec.with_media_cache(MediaCacheOptions(media_cache=str(tmp_path / "file"), media_cache_size=1), "rows")
    assert spec.with_media_cache(MediaCacheOptions(), "rows") is spec
    assert isinstance(kept_in(tmp_path, spec).media_cache, MediaCache)
