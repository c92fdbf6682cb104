"""What lowering calls the platform of live devices."""

import jax


def lowering_platform(device: jax.Device) -> str:
    """The platform for which programs of a device are lowered: "cpu", "cuda", "rocm" or "tpu".

    `device.platform` and its client's are "gpu" for both kinds of GPU. jax asks as here itself
    where it lowers (jax 0.10.2 to 0.12, `jax._src.interpreters.pxla`).
    """
    client = device.client
    return str(getattr(client, "_raw_platform", client.platform))
