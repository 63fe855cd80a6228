"""Train the two bundled CIFAR-10 classifiers, in Hugging Face format.

    python weights/bundled/train.py --data PATH/cifar10 --out DIR [--model resnet|cvt|all]
    python weights/bundled/train.py --data PATH/cifar10 --out DIR --model resnet --prune 0.9 0.95

Three networks are trained from scratch on one CUDA GPU. A wide ResNet, the teacher, learns from the
labels. Then the ResNet and the CvT, side by side with `--model all`, learn from augmented images
and from what the teacher says of them ("Knowledge distillation: a good teacher is patient and
consistent", Beyer et al. 2022). `--out/teacher` is reused if it is there.

The pictures are 32 px wide and the networks see them enlarged to SIDE px, as the preprocessor of
the saved model does. A photograph scaled down to SIDE px is far sharper than any of them, so
training adds what small pictures lack: fine texture, sharpening, other scales (`augment`).

With `--prune S` the bundled models are pruned instead, while they are trained on: weights of the
smallest magnitude become zeros in growing number, on the cubic schedule of "To prune, or not to
prune" (Zhu and Gupta 2017, arXiv:1710.01878), and stay zeros. The dense model is the teacher. Of
several S, side by side, each has its own result: `DIR/NAME-cifar10-pS` (S in percent). At the end
batch norm's statistics are taken from training pictures that are not augmented. It runs on a CPU
too; `--images` shortens an epoch there.

With `--backend maxvision` the networks that are trained run on maxvision's kernels, forward and
backward, by `torch.compile(backend="maxvision", dynamic=False)`, on a CPU too; maxvision has to be
installed, or the root of the checkout be in PYTHONPATH. Augmentation, the teacher and the optimizer
stay as they are.

With `--curves FILE.json` the loss of every epoch, and ten times on the way the accuracy of the
averaged weights on the test pictures, are written. `maxvision bench report FILE.json --plots .`
draws them in FILE-course.svg.

Every `DIR/NAME-cifar10` that is written holds config.json, preprocessor_config.json and
model.safetensors: filters and matrices as float16, vectors as float32. The accuracy printed last is
that of the saved files, read back and run in float32 on the test pictures as
`ConvNextImageProcessorPil` prepares them.
"""

import argparse
import io
import itertools
import json
import math
import sys
import time
from pathlib import Path

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
    from PIL import Image
    from safetensors.torch import save_file
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
    from transformers import (
        ConvNextImageProcessorPil,
        CvtConfig,
        CvtForImageClassification,
        ResNetConfig,
        ResNetForImageClassification,
    )
except ModuleNotFoundError as error:
    raise SystemExit(
        f"error: train.py needs the package {error.name}, which this Python does not have; run"
        " script/bootstrap torch, and . .venv/bin/activate"
    ) from None

BUNDLED = Path(__file__).parent
SIDE = 128  # px, the networks' input
PIXEL = 32  # px, the pictures of the data set
SETTLING = 8192  # pictures that a pruned model's batch norm is settled on
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

PREPROCESSOR = {
    "image_processor_type": "ConvNextImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": SIDE},
    "crop_pct": 1.0,
    "resample": 3,  # bicubic
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": list(MEAN),
    "image_std": list(STD),
}

# Each: class of the model, its configuration, peak learning rate. Sizes of the maps are for 128 px.
NETWORKS = {
    "teacher": (  # 32x32x96, 16x16x192, 8x8x384
        ResNetForImageClassification,
        ResNetConfig(
            embedding_size=64, hidden_sizes=[96, 192, 384], depths=[3, 3, 2], layer_type="basic"
        ),
        2e-3,
    ),
    "resnet": (  # 32x32x64, 16x16x96, 8x8x128, 4x4x160
        ResNetForImageClassification,
        ResNetConfig(
            embedding_size=64,
            hidden_sizes=[64, 96, 128, 160],
            depths=[2, 2, 1, 1],
            layer_type="basic",
        ),
        3e-3,
    ),
    "cvt": (  # tokens: 32x32x64, 16x16x128, 8x8x128 and the class token; heads of 64
        CvtForImageClassification,
        CvtConfig(
            embed_dim=[64, 128, 128],
            num_heads=[1, 2, 2],
            depth=[1, 2, 4],
            mlp_ratio=[2.0, 2.0, 2.0],
            drop_path_rate=[0.0, 0.0, 0.0],
        ),
        2.5e-3,
    ),
}


def load_split(path, device):
    """Decode one split of the data set.

    Args:
        path: An .npz file with `jpeg` (bytes of all files), `offset` [n + 1], `label` [n], `names`.
        device: Where the tensors go.

    Returns:
        Images, uint8 [n, 3, 32, 32]; labels, int64 [n]; the names of the classes.
    """
    split = np.load(path)
    blob, offset = split["jpeg"].tobytes(), split["offset"]
    files = (io.BytesIO(blob[start:end]) for start, end in itertools.pairwise(offset))
    images = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    images = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    labels = torch.from_numpy(split["label"].astype(np.int64))
    return images.to(device), labels.to(device), [str(name) for name in split["names"]]


def resize(images, side):
    """Resize as PIL's bicubic filter does, but unrounded: [B, C, S, S] -> [B, C, side, side]."""
    return F.interpolate(images, size=side, mode="bicubic", antialias=True).clamp(0, 1)


def texture(images):
    """Cut fine texture out of other pictures: detail that no enlarged picture of 32 px has.

    Pictures are laid side by side at their own size and what survives scaling that mosaic down to
    32 px is taken off.

    Args:
        images: float [B, 3, 32, 32] in 0..1.

    Returns:
        float [B, 3, SIDE, SIDE], about zero on average.
    """
    count, k = len(images), SIDE // PIXEL
    tiles = images[torch.randint(count, (count, k, k), device=images.device)]
    mosaic = tiles.permute(0, 3, 1, 4, 2, 5).reshape(count, 3, SIDE, SIDE)
    return mosaic - resize(resize(mosaic, PIXEL), SIDE)


def warp(images, strong):
    """Mirror, shift, scale, turn and shear each image: the `strong` ones more than the others.

    What lies outside an image is its reflection.

    Args:
        images: float [B, C, S, S].
        strong: bool [B].

    Returns:
        float [B, C, S, S].
    """
    count, device = len(images), images.device

    def uniform(reach):
        return (torch.rand(count, device=device) * 2 - 1) * reach

    zoom = torch.exp(torch.where(strong, uniform(0.45), uniform(0.1)))
    angle = torch.where(strong, uniform(0.35), uniform(0.05))
    shear = torch.where(strong, uniform(0.25), 0.0)
    mirror = torch.where(torch.rand(count, device=device) < 0.5, -1.0, 1.0)
    cos, sin = torch.cos(angle) * zoom, torch.sin(angle) * zoom
    rows = (
        torch.stack([mirror * cos, shear - sin, uniform(0.25)], 1),
        torch.stack([mirror * sin, cos, uniform(0.25)], 1),
    )
    grid = F.affine_grid(torch.stack(rows, 1), images.shape, align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


def augment(images, targets, wild):
    """Enlarge and augment a batch of training pictures.

    In this order: warp, brightness, contrast and saturation, sharpening or blur, foreign fine
    texture, and mixup or CutMix with the neighbour in the batch.

    Args:
        images: uint8 [B, 3, 32, 32].
        targets: float [B, classes], the share of each class.
        wild: float scalar in 0..1: half of this share is warped strongly, 60% of it is mixed.

    Returns:
        float [B, 3, SIDE, SIDE] normalised with MEAN and STD, channels last; targets mixed alike.
    """
    count, device = len(images), images.device

    def uniform(low, high):
        return low + (high - low) * torch.rand(count, 1, 1, 1, device=device)

    small = images.float() / 255
    x = warp(resize(small, SIDE), torch.rand(count, device=device) < 0.5 * wild)

    x = x * uniform(0.7, 1.3)
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + (x - mean) * uniform(0.7, 1.3)
    grey = x.mean(1, keepdim=True)
    x = grey + (x - grey) * uniform(0.2, 1.6)

    kernel = 2 * (SIDE // PIXEL) - 1
    blurred = F.avg_pool2d(x, kernel, 1, kernel // 2, count_include_pad=False)
    x = x + (x - blurred) * uniform(-0.5, 1.0)
    x = x + texture(small) * uniform(-0.8, 0.8).relu()
    x = x.clamp(0, 1)

    kind, share = uniform(0, 1), uniform(0, 1)
    across = torch.arange(SIDE, device=device) + 0.5
    half = SIDE * share.sqrt() / 2
    box = ((across.view(1, 1, 1, -1) - uniform(0, SIDE)).abs() < half) & (
        (across.view(1, 1, -1, 1) - uniform(0, SIDE)).abs() < half
    )
    weight = torch.where(kind < 0.3 * wild, share.expand_as(box), box.float()) * (kind < 0.6 * wild)
    x = torch.lerp(x, x.roll(1, 0), weight)
    targets = torch.lerp(targets, targets.roll(1, 0), weight.mean((2, 3)).squeeze(1)[:, None])

    mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (MEAN, STD))
    return ((x - mean) / std).contiguous(memory_format=torch.channels_last), targets


class Pruner:
    """Sets the weights of a network that matter least to zero, more of them from step to step.

    Weights of all layers are ranked by one score, LAMP ("Layer-adaptive sparsity for the
    magnitude-based pruning", Lee et al. 2021, arXiv:2010.07611): magnitudes alone would empty
    layers whose weights are small because batch norm scales them up again. The first convolution,
    the classifier and depthwise convolutions stay dense, as `maxvision weights prune` leaves them.
    """

    RAMP = 0.5  # of the steps, in which the zeros grow; then the masks stay

    def __init__(self, model, sparsity, steps):
        """Prune `model` to the share `sparsity` of zeros within `steps` batches."""
        matrices = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)][
            1:-1
        ]
        self.weights = [m.weight for m in matrices if getattr(m, "groups", 1) == 1]
        self.sparsity, self.ramp, self.count = sparsity, self.RAMP * steps, 0
        self.every = max(1, min(10, steps // 20))  # steps between two masks
        self.masks = [torch.ones_like(w) for w in self.weights]

    @torch.no_grad()
    def step(self):
        """Apply the masks, after they were made anew if it is time; call after each batch."""
        if self.count % self.every == 0 and self.count < self.ramp + self.every:
            done = min(1.0, self.count / self.ramp)
            share = self.sparsity * (1 - (1 - done) ** 3)
            scores = torch.cat([self.score(w) for w in self.weights])
            zeros = round(share * len(scores))
            mask = torch.ones_like(scores)
            mask[scores.topk(zeros, largest=False).indices] = 0
            parts = mask.split([w.numel() for w in self.weights])
            for kept, part in zip(self.masks, parts, strict=True):
                kept.copy_(part.view_as(kept))
        self.count += 1
        self.apply(self.weights)

    @staticmethod
    def score(weight):
        """Divide each weight's square by the sum of those in its layer that are not smaller."""
        squares, order = weight.flatten().square().sort()
        sums = squares.flip(0).cumsum(0).flip(0)
        return torch.empty_like(squares).scatter_(0, order, squares / sums.clamp(min=1e-30))

    @torch.no_grad()
    def apply(self, weights):
        """Apply the masks to weights of the same shapes."""
        for weight, mask in zip(weights, self.masks, strict=True):
            weight.mul_(mask)


class Learner:
    """A network in training: its optimizer, its schedule and the running mean of its weights."""

    def __init__(self, name, labels, steps, device, sparsity=0.0, backend=None):
        """Build the network called `name` in NETWORKS, to be trained for `steps` batches.

        With a `sparsity` it begins with the bundled weights, at half the rate, and is pruned.
        `backend` is torch.compile's; see `compiled`.
        """
        make, config, rate = NETWORKS[name]
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: i for i, label in enumerate(labels)}
        self.folder, self.losses = folder_name(name, sparsity), []
        model = dense(name) if sparsity else make(config)
        rate = rate / 2 if sparsity else rate
        self.model = model.to(device, memory_format=torch.channels_last).train()
        self.pruner = Pruner(self.model, sparsity, steps) if sparsity else None
        decay = 0.998 if steps > 5000 else 0.98
        self.mean = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.forward = compiled(lambda images: self.model(images).logits, device, backend)
        weights = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [w for w in weights if w.ndim > 1], "weight_decay": 0.05},
                {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0},
            ],
            fused=True,
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, rate, steps, pct_start=0.04, cycle_momentum=False
        )

    def step(self, images, targets):
        """Learn from one batch, and note its loss."""
        with torch.autocast(images.device.type, torch.bfloat16):
            logits = self.forward(images)
        loss = F.cross_entropy(logits.float(), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        if self.pruner:
            self.pruner.step()
        self.mean.update_parameters(self.model)
        self.losses.append(loss.detach())

    def save(self, out):
        """Write the averaged network to the folder in `out` that `folder_name` gives it."""
        folder = Path(out) / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        model = self.mean.module
        if self.pruner:  # what was a weight until lately is not quite zero in the mean
            self.pruner.apply(Pruner(model, 0.0, 0).weights)
        model.config.architectures = [type(model).__name__]
        model.config.dtype = "float32"  # what from_pretrained makes of the float16 filters
        model.config.save_pretrained(folder)
        ConvNextImageProcessorPil(**PREPROCESSOR).save_pretrained(folder)
        write(model, folder)


def write(model, folder):
    """Write weights to model.safetensors: filters and matrices as float16, vectors as float32."""
    state = {
        key: (value.half() if value.ndim > 1 else value).contiguous().cpu()
        for key, value in model.state_dict().items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def folder_name(name, sparsity=0.0):
    """Name the folder that the network `name` is saved in."""
    suffix = f"-p{round(100 * sparsity)}" if sparsity else ""
    return name if name == "teacher" else f"{name}-cifar10{suffix}"


def dense(name):
    """Load the bundled network `name`."""
    make, _, _ = NETWORKS[name]
    return make.from_pretrained(BUNDLED / folder_name(name), dtype=torch.float32)


def compiled(function, device, backend=None):
    """Compile for a GPU; on a CPU it stays as it is, unless there is a backend for it."""
    if backend:
        return torch.compile(function, backend=backend, dynamic=False)
    return torch.compile(function) if device.type == "cuda" else function


class Curves:
    """The course of a training run, as a file that `maxvision bench report` reads."""

    def __init__(self, path, backend, images, labels):
        """Write to `path`; `images` and `labels` are the test pictures, uint8 [n, 3, 32, 32]."""
        self.path, self.engine, self.records = path, backend or "torch-compile", []
        self.batches = [
            (prepared(part), truth)
            for part, truth in zip(images.split(500), labels.split(500), strict=True)
        ]
        self.environment = {
            "gpu": torch.cuda.get_device_name() if images.is_cuda else "none",
            "command": " ".join(["python weights/bundled/train.py", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
        }

    def add(self, learner, epoch, seconds, marked):
        """Add an epoch of a learner, and where it is `marked` the accuracy of its mean too."""
        loss = torch.stack(learner.losses).mean().item()
        record = {
            "network": learner.folder, "engine": self.engine, "epoch": epoch,
            "seconds": round(seconds, 1), "loss": round(loss, 4),
        }  # fmt: skip
        if marked:
            model = learner.mean.module.eval()
            record["accuracy"] = right(model, self.batches) / sum(len(y) for _, y in self.batches)
            learner.mean.train()
        self.records.append(record)
        lines = ",\n".join(map(json.dumps, self.records))
        environment = json.dumps(self.environment)
        self.path.write_text(f'{{"environment": {environment},\n"records": [\n{lines}\n]}}\n')


def fit(
    pupils, images, labels, classes, epochs, batch, out, teacher=None, limit=None, backend=None,
    curves=None,
):  # fmt: skip
    """Train networks side by side on the same augmented batches, and save them.

    The augmentation grows gentler along a cosine, so that training ends on pictures like those the
    networks are for. Batch norm's statistics are taken anew for the averaged weights.

    Args:
        pupils: Keys of NETWORKS, each with the share of zeros to prune to; 0 trains from random
            weights.
        images: uint8 [n, 3, 32, 32].
        labels: int64 [n].
        classes: Names of the classes.
        epochs: Passes over the data; the files are written ten times on the way.
        batch: Images a step.
        out: Folder for the files.
        teacher: A network whose opinion makes up 80% of the target, or None.
        limit: Images of an epoch, drawn anew for each; all of them if None.
        backend: Of torch.compile, for the networks; see `compiled`.
        curves: Takes the course of it, a `Curves`, or None.
    """
    device, steps = images.device, min(limit or len(images), len(images)) // batch
    learners = [
        Learner(name, classes, epochs * steps, device, zeros, backend) for name, zeros in pupils
    ]
    prepare = compiled(augment, device)
    share = F.one_hot(labels, len(classes)).float() * 0.9 + 0.1 / len(classes)  # label smoothing
    began = time.monotonic()
    for epoch in range(epochs):
        pruned = any(zeros for _, zeros in pupils)
        wild = 0.0 if pruned else math.cos(math.pi / 2 * epoch / epochs)
        wild = torch.tensor(wild, device=device)
        batches = torch.randperm(len(images), device=device)[: steps * batch].split(batch)
        for index in batches:
            x, targets = prepare(images[index], share[index], wild)
            if teacher is not None:
                with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
                    targets = torch.lerp(targets, teacher(x).float().softmax(1), 0.8)
            for learner in learners:
                learner.step(x, targets)
        marked = (epoch + 1) * 10 // epochs > epoch * 10 // epochs
        seconds = time.monotonic() - began
        if marked:
            shown = ", ".join(f"{each.folder} {each.losses[-1]:.3f}" for each in learners)
            print(f"epoch {epoch + 1}/{epochs}, {seconds:.0f} s: loss {shown}", flush=True)
        for learner in learners:
            if marked:
                update_bn(
                    (prepare(images[i], share[i], wild)[0] for i in batches[:20]), learner.mean
                )
                learner.save(out)
            if curves:
                curves.add(learner, epoch + 1, seconds, marked)
            learner.losses.clear()


def teach(teacher, device):
    """Turn a network into what gives its logits."""
    teacher = teacher.to(device, memory_format=torch.channels_last).eval()
    return compiled(lambda x: teacher(x).logits, device)


@torch.no_grad()
def settle(folders, images):
    """Take batch norm's statistics of saved models anew, on pictures as their users' will be.

    Those of training are of augmented pictures, which a network with few weights left forgives
    less.

    Args:
        folders: Folders that `Learner.save` wrote; model.safetensors is written again.
        images: uint8 [n, 3, 32, 32], training pictures; SETTLING of them are drawn.
    """
    some = images[torch.randperm(len(images), device=images.device)[:SETTLING]]
    batches = [prepared(part) for part in some.split(512)]
    for folder in folders:
        model = load_saved(folder).to(images.device)
        update_bn(batches, model)
        write(model, folder)


def load_saved(folder):
    """Load a model that `Learner.save` wrote, in float32."""
    kind = CvtForImageClassification if "cvt" in folder.name else ResNetForImageClassification
    return kind.from_pretrained(folder, dtype=torch.float32)


def prepared(images):
    """Prepare uint8 [n, 3, 32, 32] as the saved model's preprocessor does: [n, 3, SIDE, SIDE]."""
    processor = ConvNextImageProcessorPil(**PREPROCESSOR)
    x = processor(list(images.cpu().numpy()), return_tensors="pt")["pixel_values"]
    return x.to(images.device)


@torch.inference_mode()
def evaluate(folders, images, labels):
    """Print the accuracy of saved models in float32, through their own preprocessor.

    Args:
        folders: Folders that `Learner.save` wrote.
        images: uint8 [n, 3, 32, 32], on the device to run on.
        labels: int64 [n].
    """
    models = [load_saved(folder).to(images.device).eval() for folder in folders]
    counts = [0] * len(models)
    for part, truth in zip(images.split(500), labels.split(500), strict=True):
        batches = [(prepared(part), truth)]
        counts = [count + right(each, batches) for count, each in zip(counts, models, strict=True)]
    for folder, count in zip(folders, counts, strict=True):
        print(f"{folder.name}: {count / len(images):.4f}", flush=True)


@torch.no_grad()
def right(model, batches):
    """Count the pictures whose class a model finds; each batch is images and labels."""
    return sum((model(x).logits.argmax(1) == truth).sum().item() for x, truth in batches)


def main():
    """Parse the command line, train what it names and print the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="holds train.npz and test.npz")
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained models")
    parser.add_argument("--model", choices=("resnet", "cvt", "teacher", "all"), default="all")
    parser.add_argument("--epochs", type=int, default=115)
    parser.add_argument("--teacher-epochs", type=int, default=180)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument(
        "--prune", type=float, nargs="+", default=[], metavar="S", help="shares of zeros"
    )
    parser.add_argument("--images", type=int, metavar="N", help="of an epoch; all if left out")
    parser.add_argument(
        "--backend", choices=("maxvision",), help="that trains; torch.compile's own if left out"
    )
    parser.add_argument("--curves", type=Path, metavar="FILE.json", help="takes its course")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for share in args.prune:
        if not 0 < share < 1:
            parser.error(f"--prune takes shares between 0 and 1, not {share}")
    if args.prune and args.model == "teacher":
        parser.error("--prune takes a bundled model: resnet, cvt or all")

    torch.manual_seed(args.seed)
    torch.backends.cudnn.allow_tf32 = False  # training runs in bfloat16, `evaluate` in float32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.prune:
        parser.error("training from random weights needs a CUDA GPU; --prune does not")
    images, labels, classes = load_split(args.data / "train.npz", device)
    test_images, test_labels, _ = load_split(args.data / "test.npz", device)

    sizes = args.batch, args.out
    curves = args.curves and Curves(args.curves, args.backend, test_images, test_labels)
    if args.prune:
        for name in ["resnet", "cvt"] if args.model == "all" else [args.model]:
            pupils = [(name, share) for share in args.prune]
            opinion = teach(dense(name), device)
            fit(
                pupils, images, labels, classes, args.epochs, *sizes, opinion, args.images,
                args.backend, curves,
            )  # fmt: skip
            folders = [args.out / folder_name(*pupil) for pupil in pupils]
            settle(folders, images)
            evaluate(folders, test_images, test_labels)
        return
    home = args.out / "teacher"
    if not (home / "model.safetensors").exists():
        fit(
            [("teacher", 0.0)], images, labels, classes, args.teacher_epochs, *sizes,
            backend=args.backend, curves=curves,
        )  # fmt: skip
        evaluate([home], test_images, test_labels)
    names = {"all": ["resnet", "cvt"], "teacher": []}.get(args.model, [args.model])
    if names:
        teacher = ResNetForImageClassification.from_pretrained(home, dtype=torch.float32)
        opinion = teach(teacher, device)
        pupils = [(name, 0.0) for name in names]
        fit(
            pupils, images, labels, classes, args.epochs, *sizes, opinion, backend=args.backend,
            curves=curves,
        )  # fmt: skip
        evaluate([args.out / folder_name(name) for name in names], test_images, test_labels)


if __name__ == "__main__":
    main()
