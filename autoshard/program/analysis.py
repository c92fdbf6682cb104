"""Analysis: one program prepared for judging layouts: sites, base module, logical axes."""

import dataclasses
from collections.abc import Container

import jax

from autoshard.compat.jaxpr import jaxprs
from autoshard.compat.jaxpr.contexts import without_mesh
from autoshard.compat.shardy import flattening, stablehlo
from autoshard.program.axes import Axes
from autoshard.program.axis_names import find_axes
from autoshard.program.placement import find_sites
from autoshard.program.program import Program
from autoshard.program.rewrite import constrained
from autoshard.program.sites import SiteMap, site_of_location


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Analysis:
    """Everything about a program that no layout changes.

    Attributes:
      module: the flattened module with every site open, its operations tagged.
      platform: that the module was lowered for.
      site_of_tag: which site a tagged constraint operation is.
      digest: of the module without locations and sites: two programs with one digest are the
        same, wherever this version of autoshard puts sites.
      as_annotated: of the step with its author's own constraints, which then is what is lowered.
      implied: what these constraints imply for its inputs, as text; part of the digest.
    """

    program: Program
    sites: SiteMap
    axes: Axes
    module: stablehlo.Operation
    platform: str
    site_of_tag: dict[int, int]
    digest: str
    as_annotated: bool = False
    implied: str = ""

    def digest_of_text(self) -> str:
        """The digest as version 0.1 made it: it differs where the step has large constants."""
        return _digest(self.module, self.site_of_tag, self.implied, hash_text=True)

    def written(self, module: stablehlo.Operation, platform: str, implied: str) -> "Analysis":
        """The same of the step with its author's own constraints, which has no sites."""
        return dataclasses.replace(
            self,
            module=module,
            axes=dataclasses.replace(self.axes, sites={}),
            platform=platform,
            site_of_tag={},
            digest=_digest(module, {}, implied),
            as_annotated=True,
            implied=implied,
        )


def _digest(
    module: stablehlo.Operation, tags: Container[int], more: str, hash_text: bool = False
) -> str:
    return "step:" + stablehlo.digest_without(module, tags, more, hash_text=hash_text)[:24]


@without_mesh()
def analyse(program: Program, platform: str) -> Analysis:
    """Lowers a program once with every site open and reads what the partitioner knows of it."""
    returned = len(program.state) if program.returns_state else 0
    sites = find_sites(program.step, len(program.state), returned)
    opened = constrained(
        sites, lambda site: jaxprs.open_sharding(len(site.shape), program.pinned_mesh)
    )
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in program.inputs]
    module = flattening.flatten(stablehlo.lower_abstract(opened, shapes, platform))
    stablehlo.tag(module)
    site_of_tag = {
        tag: site
        for tag, location in stablehlo.constraint_locations(module)
        if (site := site_of_location(location)) is not None
    }
    return Analysis(
        program=program,
        sites=sites,
        axes=find_axes(program, module, sites.sites),
        module=module,
        platform=platform,
        site_of_tag=site_of_tag,
        digest=_digest(module, site_of_tag, ""),
    )
