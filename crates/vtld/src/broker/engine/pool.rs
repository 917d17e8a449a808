//! Which grafts this host may use, and which of them are in the kernel.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use serde_json::{Value, json};
use vtl_bpf::objects;
use vtl_control::{Deployed, Graft, Grafts, RefusedFile};
use vtl_pool::{
    Pool, Version,
    object::{Parameter, fingerprint},
    pool::{Entry, Origin},
};
use vtl_proto::{
    carrier::GRAFT_PORT,
    intf,
    services::{GraftInfo, ParamRange, Requirements, Services, select},
};

use super::{
    super::{
        Question,
        launcher::{Deployable, News, find},
        now_ns,
        session::Wish,
    },
    BROKEN_NS, Engine,
};

/// A graft of the pool, in the version that is in the kernel or would be.
pub(super) struct Pooled {
    pub(super) info: GraftInfo,
    /// Of two that provide what is asked for, the one with the higher rank is offered first.
    pub(super) rank: u32,
    pub(super) params: Vec<Parameter>,
    pub(super) image: Arc<[u8]>,
    /// Taken out by hand: not to be used until it is deployed again.
    pub(super) disabled: bool,
    /// When the kernel last refused it, and why.
    failed: Option<(u64, String)>,
    version: Version,
}

impl Pooled {
    fn of(entry: &Entry) -> Self {
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
            failed: None,
            version: m.version,
        }
    }

    /// Why it is not tried: the kernel refused it a moment ago.
    fn failed(&self) -> Option<&str> {
        let (at, why) = self.failed.as_ref()?;
        (now_ns().saturating_sub(*at) <= BROKEN_NS).then_some(why)
    }
}

/// The grafts that sessions may use, without those that the kernel refused a moment ago.
pub(super) fn working(pool: &[Pooled]) -> impl Iterator<Item = &GraftInfo> {
    let works = |p: &&Pooled| !p.disabled && p.failed().is_none();
    pool.iter().filter(works).map(|p| &p.info)
}

/// What comes with this build.
pub(super) fn built_in() -> vtl_pool::Result<Pool> {
    let version = env!("CARGO_PKG_VERSION").parse();
    let images = objects::GRAFTS.iter().map(|(_, image)| *image);
    Pool::new(images, version.expect("cargo's versions are like ours"))
}

impl Engine {
    /// Uses what was read of the pool's directory; grafts in the kernel stay what they are.
    pub(super) fn use_library(&mut self, library: Pool) {
        self.library = library;
        let deployed: BTreeSet<String> = self.plane.grafts().map(|g| g.name.clone()).collect();
        let entries = self.library.entries();
        let names: BTreeSet<&str> = entries.iter().map(|e| e.manifest.name.as_str()).collect();
        self.pool
            .retain(|p| deployed.contains(&p.info.name) || names.contains(p.info.name.as_str()));
        for name in names.iter().filter(|name| !deployed.contains(**name)) {
            let best = self.library.find(name).expect("it is in there");
            let mut pooled = Pooled::of(best);
            match self.pool.iter_mut().find(|p| p.info.name == **name) {
                Some(old) => {
                    pooled.disabled = old.disabled;
                    if pooled.version == old.version {
                        pooled.failed = old.failed.take();
                    }
                    *old = pooled;
                }
                None => self.pool.push(pooled),
            }
        }
        self.pool.sort_by_key(|p| Reverse(p.rank));
    }

    /// Goes on with what the launcher has done.
    pub(super) fn launcher_news(&mut self) {
        while let Some(news) = self.launcher.news() {
            match news {
                News::Launched { gid, loaded, took } => {
                    let installed =
                        loaded.and_then(|l| self.plane.install(l).map_err(|e| e.to_string()));
                    self.launched(gid, installed, took);
                }
                News::Deployable(deployable) => self.deploy(*deployable),
                News::Read { library, question } => self.answer(library, question),
                News::Interfaces { new, gone } => self.use_interfaces(new, &gone),
            }
        }
    }

    fn launched(
        &mut self,
        gid: u16,
        installed: Result<vtl_bpf::plane::GraftInfo, String>,
        took: Duration,
    ) {
        let pooled = self.pool.iter_mut().find(|p| p.info.gid == gid);
        match installed {
            Ok(info) => tracing::info!(
                graft = info.name,
                gid,
                instructions = info.instructions,
                ms = took.as_secs_f64() * 1e3,
                "deployed"
            ),
            Err(error) => {
                tracing::warn!(error, gid, "not deployed");
                if let Some(pooled) = pooled {
                    pooled.failed = Some((now_ns(), error));
                }
            }
        }
    }

    fn answer(&mut self, library: Result<Pool, String>, question: Question) {
        let unread = library.map(|library| self.use_library(library)).err();
        match question {
            Question::Grafts { reply } => {
                let _ = reply.send(Ok(self.grafts(unread)));
            }
            Question::Describe { name, reply } => {
                let _ = reply.send(unread.map_or_else(|| self.describe(&name), Err));
            }
            Question::Carries { over, reply } => {
                let _ = reply.send(unread.map_or_else(|| self.carries(&over), Err));
            }
        }
    }

    /// Puts a graft into the kernel that was verified.
    fn deploy(&mut self, new: Deployable) {
        self.use_library(new.library);
        let pooled = Pooled::of(&new.entry);
        let name = pooled.info.name.clone();
        let there = self.plane.grafts().any(|g| g.name == name);
        let installed = if new.swap && !there {
            Err(format!(
                "no graft \"{name}\" is deployed: vtl graft deploy {name}"
            ))
        } else {
            self.make_room(&pooled)
                .and_then(|()| self.plane.install(new.loaded).map_err(|e| e.to_string()))
        };
        let info = match installed {
            Ok(info) => info,
            Err(why) => {
                let _ = new.reply.send(Err(why));
                return;
            }
        };
        let answer = Deployed {
            name,
            version: pooled.version.to_string(),
            gid: info.gid,
            instructions: info.instructions,
            ms: new.started.elapsed().as_secs_f64() * 1e3,
        };
        self.pool.retain(|p| p.info.name != pooled.info.name);
        self.pool.push(pooled);
        self.pool.sort_by_key(|p| Reverse(p.rank));
        match new.package {
            Some(package) => self.launcher.keep(package, answer, new.reply),
            None => {
                let _ = new.reply.send(Ok(answer));
            }
        }
    }

    /// Makes room for a graft that takes the place of what is in the kernel under its name. Where
    /// its sessions' state is laid out in another way, those of hooked flows end, which go on over
    /// TCP and then by the new one.
    fn make_room(&mut self, new: &Pooled) -> Result<(), String> {
        let name = &new.info.name;
        let there = self.plane.grafts().find(|g| g.name == *name);
        let old = self.pool.iter().find(|p| p.info.name == *name);
        let (Some(there), Some(old)) = (there, old) else {
            return Ok(());
        };
        if old.version.is_compatible(new.version) {
            return Ok(());
        }
        let (gid, version) = (there.gid, old.version);
        self.end_carriers(gid).map_err(|used| {
            format!(
                "graft \"{name}\" {version} carries {used} sessions of applications, whose state \
                 {} lays out in another way: end them first",
                new.version
            )
        })
    }

    /// Whether a graft of the pool is in the kernel. If not, it is being loaded, and
    /// [`Engine::resume`] will be called.
    ///
    /// # Errors
    /// It cannot be. `vtl graft deploy` says more precisely why it is refused.
    pub(super) fn graft_ready(&mut self, gid: u16) -> Result<bool, String> {
        if self.plane.grafts().any(|g| g.gid == gid) {
            return Ok(true);
        }
        let usable = |p: &&Pooled| p.info.gid == gid && !p.disabled;
        let pooled = self.pool.iter().find(usable);
        let pooled = pooled.ok_or_else(|| format!("the pool has no graft {gid}"))?;
        match pooled.failed() {
            Some(why) => Err(why.to_owned()),
            None => {
                self.launcher.launch(gid, &pooled.image);
                Ok(false)
            }
        }
    }

    /// The grafts that a session may use, in order of preference, whether they are in the kernel
    /// yet or not; without those that it refused a moment ago. Who asks for nothing gets nothing
    /// first, who asks for something the best of those that provide it.
    pub(super) fn usable(&self, wanted: &Requirements) -> Vec<GraftInfo> {
        let mut usable = select(working(&self.pool), wanted);
        if wanted.required().is_empty() && wanted.prefer.is_empty() {
            usable.sort_by_key(|g| g.provides.count());
        }
        usable.into_iter().cloned().collect()
    }

    /// The grafts to offer for a wish, at least one.
    pub(super) fn candidates(&self, wish: &Wish) -> Result<Vec<GraftInfo>, String> {
        let mut usable = self.usable(&wish.wanted);
        if let Some(name) = &wish.graft {
            let pooled = self.pool.iter().find(|p| p.info.name == *name);
            let pooled = pooled
                .filter(|p| !p.disabled)
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
            let pooled = self.pool.iter().find(|p| p.info.gid == g.gid);
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
        let refused = self.pool.iter().filter(|p| !p.disabled);
        let mut refused = refused.filter(|p| !wish.wanted.excludes(&p.info));
        if let Some(why) = refused.find_map(|p| p.failed()) {
            return why.to_owned();
        }
        if self.pool.iter().any(|p| !p.disabled && with(&p.info)) {
            return format!(
                "every graft of the pool with {required} also has what was prohibited: {}",
                wish.wanted.prohibit
            );
        }
        let all = self.pool.iter().filter(|p| !p.disabled);
        let all = all.fold(Services::NONE, |all, p| all | p.info.provides.implied());
        match all.missing(required) {
            Services::NONE => format!("no graft of the pool provides {required} together"),
            missing => format!("no graft of the pool provides {missing}"),
        }
    }

    /// Open sessions over a graft.
    fn sessions_of(&self, gid: u16) -> Vec<u32> {
        let is_it = |sid: &u32| {
            let entry = self.plane.sessions().get(*sid);
            entry.is_some_and(|e| e.state() == intf::VTL_OPEN && e.snapshot().gid == gid)
        };
        self.sessions.keys().copied().filter(is_it).collect()
    }

    /// Ends a graft's sessions if all of them are hooked flows', which go on over TCP.
    ///
    /// # Errors
    /// How many there are of applications. Nothing has ended then.
    fn end_carriers(&mut self, gid: u16) -> Result<(), usize> {
        let is_carrier = |sid: &u32| {
            let session = self.sessions.get(sid);
            session.is_some_and(|session| session.port == GRAFT_PORT)
        };
        let all = self.sessions_of(gid).into_iter();
        let (carriers, others): (Vec<_>, Vec<_>) = all.partition(is_carrier);
        if !others.is_empty() {
            return Err(others.len());
        }
        for sid in carriers {
            self.abort(sid);
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, name: &str) -> Result<(), String> {
        let gid = self.plane.grafts().find(|g| g.name == name).map(|g| g.gid);
        let gid = gid.ok_or_else(|| format!("no graft \"{name}\" is deployed: vtl graft list"))?;
        self.end_carriers(gid).map_err(|used| {
            format!("graft \"{name}\" carries {used} sessions of applications: end them first")
        })?;
        self.plane.remove(name).map_err(|e| e.to_string())?;
        for pooled in self.pool.iter_mut().filter(|p| p.info.gid == gid) {
            pooled.disabled = true;
        }
        Ok(())
    }

    /// The pool, a row for each graft, and what is refused of the directory, or all of it.
    fn grafts(&mut self, unread: Option<String>) -> Grafts {
        let instructions: HashMap<&str, usize> = self
            .plane
            .grafts()
            .map(|g| (g.name.as_str(), g.instructions))
            .collect();
        let mut pooled: Vec<&Pooled> = self.pool.iter().collect();
        pooled.sort_by_key(|p| p.info.gid);
        let rows = pooled
            .into_iter()
            .map(|p| {
                let name = p.info.name.as_str();
                let entry = self.library.find(&format!("{name}@{}", p.version));
                let signer = match entry.map(|e| &e.origin) {
                    Some(Origin::Package { signer, .. }) => signer,
                    Some(Origin::BuiltIn) => "built in",
                    None => "gone from the pool",
                };
                Graft {
                    name: name.to_owned(),
                    version: p.version.to_string(),
                    gid: p.info.gid,
                    services: p.info.provides.to_string(),
                    bytes: p.image.len(),
                    instructions: instructions.get(name).copied().unwrap_or(0),
                    deployed: instructions.contains_key(name),
                    signer: signer.to_owned(),
                }
            })
            .collect();
        let refused = self
            .library
            .refused()
            .iter()
            .map(|(path, why)| RefusedFile {
                file: path.clone(),
                why: why.to_string(),
            });
        let unread = unread.map(|why| RefusedFile {
            file: self.config.pool.clone(),
            why,
        });
        Grafts {
            grafts: rows,
            refused: refused.chain(unread).collect(),
        }
    }

    /// All that is known of one graft of the pool.
    fn describe(&mut self, wanted: &str) -> Result<Value, String> {
        let entry = find(&self.library, wanted)?;
        let m = &entry.manifest;
        let this = |p: &&Pooled| p.info.name == m.name && p.version == m.version;
        let pooled = self.pool.iter().find(this);
        let in_kernel = self.plane.grafts().find(|g| g.name == m.name);
        let deployed = in_kernel.zip(pooled);
        // The file may have been replaced since.
        let object = deployed.map_or(&entry.object, |(_, p)| &p.image);
        let (signer, package) = match &entry.origin {
            Origin::BuiltIn => ("built in", None),
            Origin::Package { path, signer } => (signer.as_str(), Some(path)),
        };
        let mut answer = m.to_json();
        answer["signer"] = signer.into();
        answer["package"] = json!(package);
        answer["bytes"] = object.len().into();
        answer["sha256"] = fingerprint(object).into();
        answer["deployed"] = deployed.is_some().into();
        answer["sessions"] = json!(self.sessions_of(m.gid));
        answer["instructions"] = deployed.map_or(0, |(g, _)| g.instructions).into();
        Ok(answer)
    }
}
