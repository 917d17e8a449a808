//! The grafts that this host's sessions may use, deployed to the kernel or not.

use std::{cmp::Reverse, collections::BTreeSet, sync::Arc, time::Duration};

use vtl_bpf::objects;
use vtl_pool::{Pool, Version, object::Parameter, pool::Entry, revocations::Identity};
use vtl_proto::{
    carrier::GraftSpec,
    nego::Offered,
    services::{GraftInfo, ParamRange, Requirements, Services, select},
};

use super::{MS, now_ns, session::SessionSpec};
use crate::hooker::CarrierOptions;

/// Back-off before a graft that failed to load is tried again.
const BROKEN_NS: u64 = 60_000 * MS;
/// Services that a session needs to carry TCP connections.
const FLOWS: Services = Services::TCP;

/// The same for a graft that is named. Whoever names its window says how much it may have under way, so it need not
/// control congestion.
fn of_flows(graft: &GraftSpec) -> Services {
    match graft.params.contains_key("window") {
        true => Services::CONGESTION_CONTROL.missing(FLOWS),
        false => FLOWS,
    }
}

/// A graft of the pool, in the version that is deployed or would be.
pub(super) struct Pooled {
    pub(super) info: GraftInfo,
    /// Of two grafts with the requested services, the one with the higher rank is offered first.
    pub(super) rank: u32,
    pub(super) params: Vec<Parameter>,
    pub(super) image: Arc<[u8]>,
    /// Removed by the operator: unused until it is deployed again.
    pub(super) disabled: bool,
    /// Revoked while deployed: open sessions keep it, new ones may not use it.
    pub(super) revoked: bool,
    /// Identity of its package, for revocations.
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
            min: p.min,
            max: p.max,
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

    /// Why the kernel refused it, during the back-off.
    pub(super) fn failed(&self) -> Option<&str> {
        let (at, why) = self.failed.as_ref()?;
        (now_ns().saturating_sub(*at) <= BROKEN_NS).then_some(why)
    }
}

/// The grafts built into this binary.
pub(super) fn built_in() -> vtl_pool::Result<Pool> {
    let version = env!("CARGO_PKG_VERSION").parse();
    let images = objects::GRAFTS.iter().map(|(_, image)| *image);
    Pool::new(images, version.expect("cargo's versions are like ours"))
}

/// The request for a session that carries flows.
pub(crate) fn spec_for_flows(options: Option<&CarrierOptions>) -> SessionSpec {
    let mut request = SessionSpec::from(FLOWS);
    match options {
        // A stack is no session.
        None | Some(CarrierOptions::Spread(_) | CarrierOptions::Stack(_)) => {}
        Some(CarrierOptions::Lossy(graft)) => request = named(graft, Services::NONE),
        Some(CarrierOptions::Graft(graft)) => request = named(graft, of_flows(graft)),
        Some(CarrierOptions::Services(wanted)) => {
            request.wanted = *wanted;
            request.wanted.services = FLOWS | wanted.services;
        }
    }
    request
}

/// The request for a session over this graft.
fn named(graft: &GraftSpec, services: Services) -> SessionSpec {
    SessionSpec {
        graft: Some(graft.name.clone()),
        params: graft.params.clone().into_iter().collect(),
        ..SessionSpec::from(services)
    }
}

/// All grafts, in descending rank.
#[derive(Default)]
pub(super) struct GraftPool {
    /// The host's pool, with all versions of all grafts, as last read from the directory.
    host_pool: Pool,
    pooled: Vec<Pooled>,
}

impl GraftPool {
    /// The host's pool, as last read from the directory.
    pub(super) fn host_pool(&self) -> &Pool {
        &self.host_pool
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

    /// Grafts that are neither removed by the operator nor revoked.
    pub(super) fn enabled(&self) -> impl Iterator<Item = &Pooled> {
        self.iter().filter(|p| !p.disabled && !p.revoked)
    }

    /// Whether sessions may use a graft with this object.
    pub(super) fn uses(&self, gid: u16, image: &[u8]) -> bool {
        let mut enabled = self.enabled();
        enabled.any(|p| p.info.gid == gid && *p.image == *image)
    }

    /// Grafts that sessions may use, without those in back-off.
    pub(super) fn working(&self) -> impl Iterator<Item = &GraftInfo> {
        let works = self.enabled().filter(|p| p.failed().is_none());
        works.map(|p| &p.info)
    }

    /// Takes the pool as read from its directory; deployed grafts stay unchanged, but get no new sessions if
    /// they are revoked.
    pub(super) fn use_host_pool(&mut self, host_pool: Pool, deployed: &BTreeSet<String>) {
        self.host_pool = host_pool;
        let entries = self.host_pool.entries();
        let names: BTreeSet<&str> = entries.iter().map(|e| e.manifest.name.as_str()).collect();
        self.pooled
            .retain(|p| deployed.contains(&p.info.name) || names.contains(p.info.name.as_str()));
        for name in names.iter().filter(|name| !deployed.contains(**name)) {
            let best = self.host_pool.find(name).expect("it is in there");
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
            let revoked = |identity| self.host_pool.revokes(identity);
            pooled.revoked = pooled.identity.as_ref().is_some_and(revoked);
        }
        self.pooled.sort_by_key(|p| Reverse(p.rank));
    }

    /// Notes that the kernel has refused a graft.
    pub(super) fn note_failed(&mut self, gid: u16, why: String) {
        let mut pooled = self.pooled.iter_mut();
        if let Some(pooled) = pooled.find(|p| p.info.gid == gid) {
            pooled.failed = Some((now_ns(), why));
        }
    }

    /// Notes that the operator has removed a graft.
    pub(super) fn disable(&mut self, gid: u16) {
        for pooled in self.pooled.iter_mut().filter(|p| p.info.gid == gid) {
            pooled.disabled = true;
        }
    }

    /// Replaces the graft of the same name.
    pub(super) fn replace(&mut self, new: Pooled) {
        self.pooled.retain(|p| p.info.name != new.info.name);
        self.pooled.push(new);
        self.pooled.sort_by_key(|p| Reverse(p.rank));
    }

    /// Grafts with the wanted services, in order of preference, deployed or not, without those in back-off.
    /// Without requirements the graft with the fewest services is first, otherwise the best match.
    pub(super) fn usable(&self, wanted: &Requirements) -> Vec<GraftInfo> {
        let mut usable = select(self.working(), wanted);
        if wanted.required().is_empty() && wanted.prefer.is_empty() {
            usable.sort_by_key(|g| g.provides.count());
        }
        usable.into_iter().cloned().collect()
    }

    /// The grafts to offer for a request; never empty.
    pub(super) fn candidates(&self, request: &SessionSpec) -> Result<Vec<GraftInfo>, String> {
        let mut usable = self.usable(&request.wanted);
        if let Some(name) = &request.graft {
            let pooled = self.by_name(name);
            let pooled = pooled
                .filter(|p| !p.disabled && !p.revoked)
                .ok_or_else(|| format!("the pool has no graft \"{name}\": vtl graft list"))?;
            request.check(&pooled.params)?;
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
        } else if !request.params.is_empty() {
            return Err("parameters are a graft's: name it, too".into());
        }
        let allowed = |g: &GraftInfo| {
            let pooled = self.by_gid(g.gid);
            let asked = pooled.map_or_else(Vec::new, |p| request.asked(&p.params, None));
            let range = |i: u8| g.params.get(usize::from(i));
            asked
                .iter()
                .all(|(i, value)| range(*i).is_some_and(|p| p.allows(*value)))
        };
        usable.retain(allowed);
        if usable.is_empty() {
            return Err(self.lacking(request));
        }
        Ok(usable)
    }

    /// Why no graft matches.
    fn lacking(&self, request: &SessionSpec) -> String {
        let required = request.wanted.required();
        let with = |g: &GraftInfo| g.satisfies(required);
        let refused = self.enabled();
        let mut refused = refused.filter(|p| !request.wanted.excludes(&p.info));
        if let Some(why) = refused.find_map(|p| p.failed()) {
            return why.to_owned();
        }
        if self.enabled().any(|p| with(&p.info)) {
            return format!(
                "every graft of the pool with {required} also has what was prohibited: {}",
                request.wanted.prohibit
            );
        }
        let all = self.enabled();
        let all = all.fold(Services::NONE, |all, p| all | p.info.provides.implied());
        match all.missing(required) {
            Services::NONE => format!("no graft of the pool provides {required} together"),
            missing => format!("no graft of the pool provides {missing}"),
        }
    }

    /// The offer of these grafts in NEGO, with the requested parameters.
    pub(super) fn offered(
        &self,
        gids: &[u16],
        request: &SessionSpec,
        rtt: Option<Duration>,
    ) -> Vec<Offered> {
        let offered = |gid: &u16| {
            let pooled = self.by_gid(*gid)?;
            Some(Offered {
                gid: *gid,
                params: pooled.info.params.clone(),
                asked: request.asked(&pooled.params, rtt),
            })
        };
        gids.iter().filter_map(offered).collect()
    }

    /// Checks that hooked connections can be carried this way.
    pub(super) fn carries(&self, options: &CarrierOptions) -> Result<(), String> {
        let graft = match options {
            CarrierOptions::Graft(graft) => graft,
            CarrierOptions::Services(_)
            | CarrierOptions::Lossy(_)
            | CarrierOptions::Spread(_)
            | CarrierOptions::Stack(_) => {
                return self.candidates(&spec_for_flows(Some(options))).map(|_| ());
            }
        };
        let others = || {
            let fits = self.enabled();
            let fits = fits.filter(|p| p.info.provides.contains(FLOWS));
            let names = fits.map(|p| format!("graft:{}", p.info.name));
            names.collect::<Vec<_>>().join(", ")
        };
        let needed = of_flows(graft);
        match self.enabled().find(|p| p.info.name == graft.name) {
            Some(p) if p.info.provides.contains(needed) => {
                let wrong = spec_for_flows(Some(options)).check(&p.params);
                wrong.map_err(|why| format!("graft:{graft}: {why}"))
            }
            Some(p)
                if p.info.provides.missing(needed) == Services::CONGESTION_CONTROL
                    && p.params.iter().any(|param| param.name == "window") =>
            {
                Err(format!(
                    "graft:{graft} cannot carry TCP connections, it lacks congestion control: say how many packets it may \
                     have under way (graft:{}?window=64), or take one of {}",
                    graft.name,
                    others()
                ))
            }
            Some(p) => Err(format!(
                "graft:{graft} cannot carry TCP connections, it lacks {}: there are {}",
                p.info.provides.missing(needed),
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
    fn carries__by_what_a_graft_provides_and_its_parameters() {
        let mut pool = GraftPool::default();
        pool.use_host_pool(built_in().expect("grafts"), &BTreeSet::new());
        let carries = |graft: &str| {
            let graft: GraftSpec = graft.parse().expect("one");
            match vtl_proto::carrier::may_lose(&graft.name) {
                true => pool.carries(&CarrierOptions::Lossy(graft)),
                false => pool.carries(&CarrierOptions::Graft(graft)),
            }
        };
        for graft in [
            "stream",
            "go-back-n?window=16",
            "selective-repeat?window=32768",
            "partial-reliability",
            "partial-reliability?max-loss=1000&window=1&lifetime=100",
            "udp-lite?coverage=0",
        ] {
            assert_eq!(carries(graft), Ok(()), "{graft}");
        }
        for (graft, about) in [
            ("go-back-n", "congestion control: say how many packets"),
            ("go-back-n?window=0", "window 0 is out of range: 1 to 32768"),
            ("stream?window=9", "no parameter \"window\""),
            ("canonical", "it lacks"),
            ("none?window=1", "there is no carrier graft:none"),
            ("partial-reliability?max-loss=1001", "out of range"),
            ("partial-reliability?max_loss=1", "no parameter"),
        ] {
            let error = carries(graft).expect_err(graft);
            assert!(error.contains(about), "{graft}: {error}");
        }
    }

    #[test]
    fn uses__what_was_not_taken_out_or_replaced() {
        let mut pool = GraftPool::default();
        pool.use_host_pool(built_in().expect("grafts"), &BTreeSet::new());
        let some = pool.iter().next().expect("a graft");
        let (gid, image) = (some.info.gid, Arc::clone(&some.image));
        assert!(pool.uses(gid, &image));
        assert!(!pool.uses(gid, &image[1..]));
        pool.disable(gid);
        assert!(!pool.uses(gid, &image));
    }
}
