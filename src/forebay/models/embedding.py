"""The embedding that models share."""

import jax

from forebay.sharding import Sharding


def look_up(table_VD: jax.Array, tokens_BS: jax.Array, sharding: Sharding) -> jax.Array:
    """The rows of an embedding for tokens `[batch, sequence]`, `[batch, sequence, embed]`, without gathering the table.

    Each device looks up every token of its data-parallel group in the columns it holds, and the
    devices then exchange columns for tokens: traffic is one activation, not one table, and the
    gradient of the table is never whole on a device.
    """
    if sharding.mesh.size == 1:
        return table_VD[tokens_BS]
    held = sharding.mesh_axes("embed")
    outer = tuple(a for a in sharding.mesh_axes("batch") if a not in held)
    columns = jax.sharding.PartitionSpec(outer or None, None, held or None)
    tokens_BS = jax.lax.with_sharding_constraint(
        tokens_BS, jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(outer or None, None))
    )
    x_BSD = jax.lax.with_sharding_constraint(table_VD[tokens_BS], jax.sharding.NamedSharding(sharding.mesh, columns))
    return sharding.constrain(x_BSD, "batch", "sequence", None)
