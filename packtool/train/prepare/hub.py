"""Upload of checkpoints to a model repository of the Hugging Face hub, with the strategies of transformers' Trainer.

    hub_strategy       repository's top level               folders
    every_save         newest model, after every save       none
    end                final model                          none
    checkpoint         as every_save                        last-checkpoint/, complete, to resume from
    all_checkpoints    as every_save                        checkpoint-N/, each complete

Uploads run in a thread beside training. As in the Trainer, a checkpoint is skipped while an earlier one is uploaded;
the final model is always uploaded.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from typing import NamedTuple

from huggingface_hub import HfApi

from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, StorageError
from packtool.progress import Progress

# Files of a checkpoint that only resuming needs.
_RESUME_FILES = ["optimizer*", "scheduler*", "rng_state*", "trainer_state.json", "training_args.bin", "packtool_*"]
_RESUME_FILES += ["master_weights*", "global_step*", "zero_to_fp32.py", "latest", "pytorch_model_fsdp*"]


class _Upload(NamedTuple):
    """Files of a checkpoint to upload into a folder of the repository."""

    folder: str  # "" for the top level
    commit_message: str
    ignored_files: list[str]  # patterns


class HubUploads:
    """The uploads of a run, on its first rank; creates the repository if it does not exist."""

    def __init__(self, config: TrainConfig) -> None:
        name = config.hub_model_id or os.path.basename(os.path.abspath(config.output_dir))
        self._api, self._strategy = HfApi(), config.hub_strategy
        # The hub refuses the adapter's README.md if it names a local directory as the base model.
        self._ignored = ["README.md"] if os.path.isdir(config.model) else []
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        try:
            self.repo = self._api.create_repo(name, private=config.hub_private_repo, exist_ok=True).repo_id
        except Exception as error:  # of the hub or the network, which have many types
            raise ConfigError(
                f"--push-to-hub true: the repository {name} cannot be created: {error}",
                "Log in with `hf auth login`, or set HF_TOKEN to a token that may write; check --hub-model-id.",
            ) from error

    def save(self, checkpoint: str, step: int, progress: Progress) -> None:
        """Begin to upload a finished checkpoint, unless one is being uploaded or only the final one shall be."""
        if self._strategy == "end" or (self._thread is not None and self._thread.is_alive()):
            return
        if self._error is not None:
            progress.note(f"warning: uploading to {self.repo} failed, and is tried again: {self._error}")
            self._error = None
        # Links to the files, because the checkpoint may be removed or overwritten while it is uploaded.
        copy = tempfile.mkdtemp(prefix=".upload-", dir=os.path.dirname(checkpoint))
        folder = shutil.copytree(checkpoint, os.path.join(copy, os.path.basename(checkpoint)), copy_function=_link)
        self._thread = threading.Thread(target=self._upload, args=(folder, step, copy), daemon=True)
        self._thread.start()

    def finish(self, checkpoint: str | None, step: int, progress: Progress) -> None:
        """Wait for the last upload, and upload the final model; raise a StorageError if this fails."""
        if self._thread is not None:
            self._thread.join()
        if checkpoint is None:
            return
        self._error = None
        self._upload(checkpoint, step)
        if self._error is not None:
            raise StorageError(
                f"{checkpoint} could not be uploaded to {self.repo}: {self._error}",
                f"Training is finished and complete in {os.path.dirname(checkpoint)}. Upload the model with: "
                f"hf upload {self.repo} {checkpoint}",
            ) from self._error
        progress.note(f"uploaded to {self._api.endpoint}/{self.repo}")

    def _upload(self, checkpoint: str, step: int, temporary: str | None = None) -> None:
        """Upload the model of a checkpoint to the top of the repository, and with some strategies also the checkpoint.

        Training continues if this fails: the error is kept in ``self._error``, for the next save or ``finish``.
        ``temporary`` is a directory to delete afterwards.
        """
        message = f"Training in progress, step {step}"
        uploads = [_Upload("", message, ignored_files=[*_RESUME_FILES, *self._ignored])]
        if self._strategy == "checkpoint":
            uploads.append(_Upload("last-checkpoint", f"{message}, checkpoint", self._ignored))
        elif self._strategy == "all_checkpoints":
            uploads.append(_Upload(os.path.basename(checkpoint), f"{message}, checkpoint", self._ignored))

        try:
            for upload in uploads:
                self._api.upload_folder(
                    repo_id=self.repo,
                    folder_path=checkpoint,
                    path_in_repo=upload.folder,
                    commit_message=upload.commit_message,
                    ignore_patterns=upload.ignored_files,
                )
        except Exception as error:  # an upload may fail in many ways
            self._error = error
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
