"The networks on which the engines are compared and timed."
import torch
from torch import nn
from dp_companion.training.models import _mnist_cnn as mnist_cnn


def digits_cnn():
    "For 8x8 digits."
    return mnist_cnn(image_size=8)


def cifar_cnn():
    "Three convolutions of 32, 64 and 128 channels and a funnel of linear layers."
    def block(inputs, outputs):
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    funnel = [layer for n in (400, 200, 100) for layer in (nn.LazyLinear(n), nn.ReLU())]
    model = nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), nn.Flatten(), *funnel,
                          nn.LazyLinear(10))
    with torch.no_grad(): model(torch.zeros(1, 3, 32, 32))
    return model


def group_norm_resnet18():
    "torchvision's ResNet-18 as it is, residual additions in place, with group norm for batch norm."
    from torchvision.models import resnet18
    return resnet18(num_classes=10, norm_layer=lambda channels: nn.GroupNorm(16, channels))


def small_image_resnet18(build=group_norm_resnet18):
    "The same as used at 32x32: a first 3x3 convolution that keeps every position, and no pooling."
    model = build()
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


def opacus_resnet18():
    "torchvision's ResNet-18 without in-place additions or shared ReLUs: Opacus's hooks raise."
    from torchvision.models.resnet import BasicBlock

    class OutOfPlace(BasicBlock):
        def forward(self, x):
            identity = x if self.downsample is None else self.downsample(x)
            out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
            return torch.relu(out + identity)

    model = group_norm_resnet18()
    for module in model.modules():
        if isinstance(module, BasicBlock): module.__class__ = OutOfPlace
        if isinstance(module, nn.ReLU): module.inplace = False
    return model


def opacus_small_image_resnet18(): return small_image_resnet18(opacus_resnet18)


class Mean(nn.Module):
    "The mean over the tokens."
    def forward(self, x): return x.mean(1)


def transformer(layer=nn.TransformerEncoderLayer):
    "Four layers of torch's transformer, of width 256, for 64 tokens."
    return nn.Sequential(*(layer(256, 4, 1024, dropout=0., batch_first=True) for _ in range(4)),
                         Mean(), nn.Linear(256, 10))


def opacus_transformer():
    "The same with Opacus's attention, without which its hooks record nothing."
    from opacus.layers import DPMultiheadAttention
    model = transformer()
    for layer in model[:4]: layer.self_attn = DPMultiheadAttention(256, 4, batch_first=True)
    return model


SHAPES = {transformer: (64, 256), opacus_transformer: (64, 256), mnist_cnn: (1, 28, 28),
          digits_cnn: (1, 8, 8)} | dict.fromkeys((cifar_cnn,
    group_norm_resnet18, small_image_resnet18, opacus_resnet18, opacus_small_image_resnet18),
    (3, 32, 32))


def batch(build, size, *, dtype=torch.float32, seed=0):
    "Random images of the network's shape, and labels."
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(size, *SHAPES[build], generator=draw, dtype=dtype), torch.randint(10,
        (size,), generator=draw)
