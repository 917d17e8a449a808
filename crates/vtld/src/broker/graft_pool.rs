//! Which grafts this host's sessions may use, whether they are in the kernel or not.

use std::{cmp::Reverse, collections::BTreeSet, sync::Arc, time::Duration};

use vtl_bpf::objects;
use vtl_pool::{Pool, Version, object::Parameter, pool::Entry, revocations::Identity};
use vtl_proto::{
    nego::Offered,
    services::{GraftInfo, ParamRange, Requirements, Services, select},
};

use super::{MS, now_ns, session::Wish};
use crate::hooker::Over;

/// A graft that did not load is not tried again for so long.
const BROKEN_NS: u64 = 60_000 * MS;
/// What a session needs to carry TCP connections.
const FLOWS: Services = Services::TCP;

/// A graft of the pool, in the version that is in the kernel or would be.
pub(super) struct Pooled {
    pub(super) info: GraftInfo,
    /// Of two that provide what is asked for, the one with the higher rank is offered first.
    pub(super) rank: u32,
    pub(super) params: Vec<Parameter>,
    pub(super) image: Arc<[u8]>,
    /// Taken out by hand: not to be used until it is deployed again.
    pub(super) disabled: bool,
    /// Revoked since: in the kernel for the sessions that it has, but not for others.
    pub(super) revoked: bool,
    /// Of a package.
    identity: Option<Identity>,
    /// When the kernel last refused it, and why.
    failed: Option<(u64, String)>,
    pub(super) version: Version,
}

impl Pooled {
    pub(super) fn of(entry: &Entry) -> Self {
        let m = &entry.manifest;
        let range = |p: &Parameter| ParamRange {
            initial: p.default,
            least: p.least,
            most: p.most,
        };
        Self {
            info: GraftInfo {
                name: m.name.clone(),
                gid: m.gid,
                provides: m.services,
                params: m.parameters.iter().map(range).collect(),
            },
            rank: entry.rank,
            params: m.parameters.clone(),
            image: Arc::clone(&entry.object),
            disabled: false,
            revoked: false,
            identity: entry.identity.clone(),
            failed: None,
            version: m.version,
        }
    }

    /// Why it is not tried: the kernel refused it a moment ago.
    pub(super) fn failed(&self) -> Option<&str> {
        let (at, why) = self.failed.as_ref()?;
        (now_ns().saturating_sub(*at) <= BROKEN_NS).then_some(why)
    }
}

/// What comes with this build.
pub(super) fn built_in() -> vtl_pool::Result<Pool> {
    let version = env!("CARGO_PKG_VERSION").parse();
    let images = objects::GRAFTS.iter().map(|(_, image)| *image);
    Pool::new(images, version.expect("cargo's versions are like ours"))
}

/// What a session for flows is to be like.
pub(crate) fn wish(over: Option<&Over>) -> Wish {
    let mut wish = Wish::from(FLOWS);
    match over {
        None => {}
        Some(Over::Lossy(name)) => {
            wish = Wish {
                graft: Some(name.clone()),
                ..Wish::default()
            };
        }
        Some(Over::Graft(name)) => wish.graft = Some(name.clone()),
        Some(Over::Services(wanted)) => {
            wish.wanted = *wanted;
            wish.wanted.services = FLOWS | wanted.services;
        }
    }
    wish
}

/// All of them, the one with the highest rank first.
#[derive(Default)]
pub(super) struct GraftPool {
    /// All versions of all grafts, as last read.
    library: Pool,
    pooled: Vec<Pooled>,
}

impl GraftPool {
    /// All versions, as last read.
    pub(super) fn library(&self) -> &Pool {
        &self.library
    }

    /// The grafts.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Pooled> {
        self.pooled.iter()
    }

    /// The graft with that gid.
    pub(super) fn by_gid(&self, gid: u16) -> Option<&Pooled> {
        self.iter().find(|p| p.info.gid == gid)
    }

    /// The graft of that name.
    pub(super) fn by_name(&self, name: &str) -> Option<&Pooled> {
        self.iter().find(|p| p.info.name == name)
    }

    /// Those that were neither taken out by hand nor revoked.
    pub(super) fn enabled(&self) -> impl Iterator<Item = &Pooled> {
        self.iter().filter(|p| !p.disabled && !p.revoked)
    }

    /// Whether sessions may use a graft, with this object.
    pub(super) fn uses(&self, gid: u16, image: &[u8]) -> bool {
        let mut enabled = self.enabled();
        enabled.any(|p| p.info.gid == gid && *p.image == *image)
    }

    /// The grafts that sessions may use, without those that the kernel refused a moment ago.
    pub(super) fn working(&self) -> impl Iterator<Item = &GraftInfo> {
        let works = self.enabled().filter(|p| p.failed().is_none());
        works.map(|p| &p.info)
    }

    /// Uses what was read of the pool's directory; grafts in the kernel stay what they are, but get
    /// no new sessions if they are revoked.
    pub(super) fn use_library(&mut self, library: Pool, deployed: &BTreeSet<String>) {
        self.library = library;
        let entries = self.library.entries();
        let names: BTreeSet<&str> = entries.iter().map(|e| e.manifest.name.as_str()).collect();
        self.pooled
            .retain(|p| deployed.contains(&p.info.name) || names.contains(p.info.name.as_str()));
        for name in names.iter().filter(|name| !deployed.contains(**name)) {
            let best = self.library.find(name).expect("it is in there");
            let mut pooled = Pooled::of(best);
            match self.pooled.iter_mut().find(|p| p.info.name == **name) {
                Some(old) => {
                    pooled.disabled = old.disabled;
                    if pooled.version == old.version {
                        pooled.failed = old.failed.take();
                    }
                    *old = pooled;
                }
                None => self.pooled.push(pooled),
            }
        }
        for pooled in &mut self.pooled {
            let revoked = |identity| self.library.revokes(identity);
            pooled.revoked = pooled.identity.as_ref().is_some_and(revoked);
        }
        self.pooled.sort_by_key(|p| Reverse(p.rank));
    }

    /// The kernel has refused a graft.
    pub(super) fn note_failed(&mut self, gid: u16, why: String) {
        let mut pooled = self.pooled.iter_mut();
        if let Some(pooled) = pooled.find(|p| p.info.gid == gid) {
            pooled.failed = Some((now_ns(), why));
        }
    }

    /// A graft was taken out by hand.
    pub(super) fn disable(&mut self, gid: u16) {
        for pooled in self.pooled.iter_mut().filter(|p| p.info.gid == gid) {
            pooled.disabled = true;
        }
    }

    /// A graft takes the place of what there is under its name.
    pub(super) fn replace(&mut self, new: Pooled) {
        self.pooled.retain(|p| p.info.name != new.info.name);
        self.pooled.push(new);
        self.pooled.sort_by_key(|p| Reverse(p.rank));
    }

    /// The grafts that a session may use, in order of preference, whether they are in the kernel
    /// yet or not; without those that it refused a moment ago. Who asks for nothing gets nothing
    /// first, who asks for something the best of those that provide it.
    pub(super) fn usable(&self, wanted: &Requirements) -> Vec<GraftInfo> {
        let mut usable = select(self.working(), wanted);
        if wanted.required().is_empty() && wanted.prefer.is_empty() {
            usable.sort_by_key(|g| g.provides.count());
        }
        usable.into_iter().cloned().collect()
    }

    /// The grafts to offer for a wish, at least one.
    pub(super) fn candidates(&self, wish: &Wish) -> Result<Vec<GraftInfo>, String> {
        let mut usable = self.usable(&wish.wanted);
        if let Some(name) = &wish.graft {
            let pooled = self.by_name(name);
            let pooled = pooled
                .filter(|p| !p.disabled && !p.revoked)
                .ok_or_else(|| format!("the pool has no graft \"{name}\": vtl graft list"))?;
            wish.check(&pooled.params)?;
            if let Some(why) = pooled.failed() {
                return Err(why.to_owned());
            }
            usable.retain(|g| g.name == *name);
            if usable.is_empty() {
                return Err(format!(
                    "graft \"{name}\" is not what was asked for: it provides {}",
                    pooled.info.provides
                ));
            }
        } else if !wish.params.is_empty() {
            return Err("parameters are a graft's: name it, too".into());
        }
        let allowed = |g: &GraftInfo| {
            let pooled = self.by_gid(g.gid);
            let asked = pooled.map_or_else(Vec::new, |p| wish.asked(&p.params, None));
            let range = |i: u8| g.params.get(usize::from(i));
            asked
                .iter()
                .all(|(i, value)| range(*i).is_some_and(|p| p.allows(*value)))
        };
        usable.retain(allowed);
        if usable.is_empty() {
            return Err(self.lacking(wish));
        }
        Ok(usable)
    }

    /// Why no graft will do.
    fn lacking(&self, wish: &Wish) -> String {
        let required = wish.wanted.required();
        let with = |g: &GraftInfo| g.satisfies(required);
        let refused = self.enabled();
        let mut refused = refused.filter(|p| !wish.wanted.excludes(&p.info));
        if let Some(why) = refused.find_map(|p| p.failed()) {
            return why.to_owned();
        }
        if self.enabled().any(|p| with(&p.info)) {
            return format!(
                "every graft of the pool with {required} also has what was prohibited: {}",
                wish.wanted.prohibit
            );
        }
        let all = self.enabled();
        let all = all.fold(Services::NONE, |all, p| all | p.info.provides.implied());
        match all.missing(required) {
            Services::NONE => format!("no graft of the pool provides {required} together"),
            missing => format!("no graft of the pool provides {missing}"),
        }
    }

    /// These grafts as a NEGO offers them, with the parameters that are asked for.
    pub(super) fn offered(&self, gids: &[u16], wish: &Wish, rtt: Option<Duration>) -> Vec<Offered> {
        let offered = |gid: &u16| {
            let pooled = self.by_gid(*gid)?;
            Some(Offered {
                gid: *gid,
                params: pooled.info.params.clone(),
                asked: wish.asked(&pooled.params, rtt),
            })
        };
        gids.iter().filter_map(offered).collect()
    }

    /// Whether the sessions of hooked connections can be like this.
    pub(super) fn carries(&self, over: &Over) -> Result<(), String> {
        let graft = match over {
            Over::Graft(name) => name,
            Over::Services(_) | Over::Lossy(_) => {
                return self.candidates(&wish(Some(over))).map(|_| ());
            }
        };
        let others = || {
            let fits = self.enabled();
            let fits = fits.filter(|p| p.info.provides.contains(FLOWS));
            let names = fits.map(|p| format!("graft:{}", p.info.name));
            names.collect::<Vec<_>>().join(", ")
        };
        let found = self.enabled();
        match found.map(|p| &p.info).find(|g| g.name == *graft) {
            Some(g) if g.provides.contains(FLOWS) => Ok(()),
            Some(g) => Err(format!(
                "graft:{graft} cannot carry TCP connections, it lacks {}: there are {}",
                g.provides.missing(FLOWS),
                others()
            )),
            None => Err(format!(
                "there is no carrier graft:{graft}: there are {}",
                others()
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses__what_was_not_taken_out_or_replaced() {
        let mut pool = GraftPool::default();
        pool.use_library(built_in().expect("grafts"), &BTreeSet::new());
        let some = pool.iter().next().expect("a graft");
        let (gid, image) = (some.info.gid, Arc::clone(&some.image));
        assert!(pool.uses(gid, &image));
        assert!(!pool.uses(gid, &image[1..]));
        pool.disable(gid);
        assert!(!pool.uses(gid, &image));
    }
}
