"""The peer of bench serve: the same network in torch behind LitServe.

    python -m maxvision.bench.litserved '{"model": "resnet-50", "port": 8000, ...}'

Its settings, by its documentation the faster ones, not swept: ``fast_queue`` (ZeroMQ); several
HTTP processes and workers a device, so that decoding overlaps with the network; pictures of a batch
are decoded on threads, by the same code as ours, or with ``decode`` "gpu" by torchvision's nvJPEG
and resized there by torch; channels_last, bfloat16 on a GPU with batches filled up to powers of
two; torch.compile with frozen weights, or with ``compile`` false the eager network, for which
cuDNN's choice is tuned once for each size. An image comes as base64 in JSON, as in its
documentation; it takes no raw bytes.
"""

import base64
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import litserve
import numpy as np
import torch
import torch._inductor.config
from fastapi import Request
from torch.nn.functional import interpolate, pad

from maxvision.bench.references import checkpoint, reference_model
from maxvision.common.host import cores
from maxvision.runtime.preprocess import Preprocess

LABELS = 5


class Classifier(litserve.LitAPI):
    """A network of ``bench.references`` and its preprocessing."""

    def __init__(self, settings: dict[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self._settings = settings

    def setup(self, device: str) -> None:
        """Loads the network, and runs it at every size that it will see."""
        settings = self._settings
        threads = max(1, settings["cores"] // settings["workers"])
        torch.set_num_threads(threads)
        reference = reference_model(settings["model"])
        known = checkpoint(settings["model"], reference)
        self._prepare = Preprocess.from_config(known.preprocess)
        self._labels = known.labels
        self._gpu = device.startswith("cuda")
        self._dtype = torch.bfloat16 if self._gpu else torch.float32
        self._device = device
        shape = (1, 1, 1, 3)
        self._mean = torch.tensor(self._prepare.mean, device=device).reshape(shape)
        self._std = torch.tensor(self._prepare.std, device=device).reshape(shape)
        module = reference.to(device, self._dtype, memory_format=torch.channels_last)
        self._run: Any = lambda x: module(x).logits
        if self._gpu:
            torch.backends.cudnn.benchmark = True
        if settings["compile"]:
            torch._inductor.config.freezing = True
            self._run = torch.compile(self._run, dynamic=True)
        self._pool = ThreadPoolExecutor(threads)
        sizes = [2**i for i in range(20) if 2**i <= self.max_batch_size]
        for size in sizes if self._gpu else (2, 3, self.max_batch_size, 1):
            shape = size, self._prepare.height, self._prepare.width, 3
            self.predict(torch.zeros(shape, dtype=torch.uint8))

    def decode_request(self, request: Request) -> bytes:
        """Gives the file's bytes; ``batch`` decodes those of a batch together.

        LitServe reads the annotation, and hands the body's JSON over.
        """
        body: Any = request
        return base64.b64decode(body["images"][0])

    def batch(self, inputs: list[bytes]) -> torch.Tensor:
        """Decodes and preprocesses: uint8 [N, H, W, C]."""
        if self._settings["decode"] == "gpu":
            return self._decoded(inputs)
        return torch.from_numpy(np.stack(list(self._pool.map(self._prepare, inputs))))

    def _decoded(self, files: list[bytes]) -> torch.Tensor:
        from torchvision.io import ImageReadMode, decode_jpeg

        prepare, made = self._prepare, []
        data = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
        for image in decode_jpeg(data, mode=ImageReadMode.RGB, device=self._device):
            size = prepare.scaled(*image.shape[1:])
            kind = prepare.resample.name.lower()
            scaled = interpolate(image[None].float(), size, mode=kind, antialias=True)
            top, left = (size[0] - prepare.height) // 2, (size[1] - prepare.width) // 2
            made.append(scaled[..., top : top + prepare.height, left : left + prepare.width])
        return torch.cat(made).round().clamp(0, 255).byte().permute(0, 2, 3, 1)

    @torch.inference_mode()
    def predict(self, pixels: torch.Tensor) -> list[Any]:
        """Computes the likeliest classes."""
        count = len(pixels)
        levels = pixels.to(self._device)
        if self._gpu:
            levels = pad(levels, (0, 0) * 3 + (0, (1 << (count - 1).bit_length()) - count))
        x = ((levels - self._mean) / self._std).to(self._dtype).permute(0, 3, 1, 2)
        scores = self._run(x)[:count].float().softmax(-1)
        best = scores.topk(min(LABELS, scores.shape[1]))
        return list(zip(best.values.tolist(), best.indices.tolist(), strict=True))

    def unbatch(self, output: list[Any]) -> list[Any]:
        """Gives each image's own."""
        return output

    def encode_response(self, output: Any) -> dict[str, Any]:
        """Names the classes, in the shape of our answers."""
        predictions = [
            {"label": self._labels[index], "class_id": index, "score": score}
            for score, index in zip(*output, strict=True)
        ]
        return {"object": "list", "data": [{"index": 0, "predictions": predictions}]}


def main() -> None:
    """Serves with the settings that the command line has in JSON."""
    settings = json.loads(sys.argv[1])
    settings["cores"] = cores()
    api = Classifier(
        settings,
        max_batch_size=settings["batch"],
        batch_timeout=settings["delay_ms"] / 1e3,
        api_path="/v1/classify",
    )
    server = litserve.LitServer(
        api,
        accelerator="cuda" if settings["device"] != "cpu" else "cpu",
        devices=1,
        workers_per_device=settings["workers"],
        fast_queue=True,
        timeout=60,
        track_requests=False,
    )
    server.run(
        host="127.0.0.1",
        port=settings["port"],
        num_api_servers=settings["fronts"],
        log_level="warning",
        generate_client_file=False,
        access_log=False,
    )


if __name__ == "__main__":
    main()
