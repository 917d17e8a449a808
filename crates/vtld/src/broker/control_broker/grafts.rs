//! Deployment of the pool's grafts to the kernel, and their removal.

use std::{collections::HashMap, time::Duration};

use serde_json::{Value, json};
use vtl_control::{Deployed, Graft, Grafts, RefusedFile, What};
use vtl_pool::{Pool, object::fingerprint, pool::Origin};
use vtl_proto::{carrier::GRAFT_PORT, intf};

use super::{
    super::{
        Question,
        graft_pool::Pooled,
        launcher::{Deployable, News, find},
    },
    ControlBroker,
};
use crate::events::emit;

/// Tells that a graft is in the kernel.
fn tell_deployed(graft: String, gid: u16, instructions: usize) {
    emit(What::GraftDeployed {
        graft: graft.into(),
        gid,
        instructions: instructions as u64,
    });
}

impl ControlBroker {
    /// Takes the pool as read from its directory; deployed grafts stay unchanged.
    pub(super) fn use_host_pool(&mut self, host_pool: Pool) {
        let deployed = self.plane.grafts().map(|g| g.name.clone()).collect();
        self.pool.use_host_pool(host_pool, &deployed);
    }

    /// Handles news of the launcher.
    pub(super) fn launcher_news(&mut self) {
        while let Some(news) = self.launcher.news() {
            match news {
                News::Launched {
                    gid,
                    image,
                    loaded,
                    took,
                } => {
                    // The operator may have removed, deployed or replaced it meanwhile.
                    let there = self.plane.grafts().any(|g| g.gid == gid);
                    if !there && self.pool.uses(gid, &image) {
                        let installed =
                            loaded.and_then(|l| self.plane.install(l).map_err(|e| e.to_string()));
                        self.launched(gid, installed, took);
                    }
                }
                News::Deployable(deployable) => self.deploy(*deployable),
                News::Read {
                    host_pool,
                    question,
                } => self.answer(host_pool, question),
                News::Interfaces { new, resized, gone } => {
                    self.resize_interfaces(&resized);
                    self.use_interfaces(new, &gone);
                }
            }
        }
    }

    fn launched(
        &mut self,
        gid: u16,
        installed: Result<vtl_bpf::plane::GraftInfo, String>,
        took: Duration,
    ) {
        match installed {
            Ok(info) => {
                tracing::info!(
                    graft = info.name,
                    gid,
                    instructions = info.instructions,
                    ms = took.as_secs_f64() * 1e3,
                    "graft: deployed"
                );
                tell_deployed(info.name, gid, info.instructions);
            }
            Err(error) => {
                tracing::warn!(error, gid, "graft: cannot deploy");
                self.pool.note_failed(gid, error);
            }
        }
    }

    fn answer(&mut self, host_pool: Result<Pool, String>, question: Question) {
        let unread = host_pool
            .map(|host_pool| self.use_host_pool(host_pool))
            .err();
        match question {
            Question::Grafts { reply } => {
                let _ = reply.send(Ok(self.grafts(unread)));
            }
            Question::Describe { name, reply } => {
                let _ = reply.send(unread.map_or_else(|| self.describe(&name), Err));
            }
            Question::Carries { options, reply } => {
                let _ = reply.send(unread.map_or_else(|| self.pool.carries(&options), Err));
            }
        }
    }

    /// Deploys a verified graft.
    fn deploy(&mut self, new: Deployable) {
        self.use_host_pool(new.host_pool);
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
        self.pool.replace(pooled);
        tell_deployed(answer.name.clone(), answer.gid, answer.instructions);
        match new.package {
            Some(package) => self.launcher.keep(package, answer, new.reply),
            None => {
                let _ = new.reply.send(Ok(answer));
            }
        }
    }

    /// Prepares the replacement of a deployed graft. If the two lay out sessions' state differently, ends the
    /// sessions of hooked flows, which go on over TCP and then over the new graft.
    fn make_room(&mut self, new: &Pooled) -> Result<(), String> {
        let name = &new.info.name;
        let there = self.plane.grafts().find(|g| g.name == *name);
        let old = self.pool.by_name(name);
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

    /// Whether a graft of the pool is deployed. If not, starts loading it; [`ControlBroker::resume`] follows.
    ///
    /// # Errors
    /// It cannot be loaded. `vtl graft deploy` reports more precisely why.
    pub(super) fn graft_ready(&mut self, gid: u16) -> Result<bool, String> {
        if self.plane.grafts().any(|g| g.gid == gid) {
            return Ok(true);
        }
        let pooled = self.pool.enabled().find(|p| p.info.gid == gid);
        let pooled = pooled.ok_or_else(|| format!("the pool has no graft {gid}"))?;
        match pooled.failed() {
            Some(why) => Err(why.to_owned()),
            None => {
                self.launcher.launch(gid, &pooled.image);
                Ok(false)
            }
        }
    }

    /// Open sessions over a graft.
    fn sessions_of(&self, gid: u16) -> Vec<u32> {
        let is_it = |sid: &u32| {
            let entry = self.plane.sessions().get(*sid);
            entry.is_some_and(|e| e.state() == intf::VTL_OPEN && e.snapshot().gid == gid)
        };
        self.sessions.indexes_from(0).filter(is_it).collect()
    }

    /// Ends a graft's sessions if all of them are hooked flows', which go on over TCP.
    ///
    /// # Errors
    /// The number of applications' sessions. Nothing has ended then.
    fn end_carriers(&mut self, gid: u16) -> Result<(), usize> {
        let is_carrier = |sid: &u32| {
            let session = self.sessions.get(*sid);
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
        emit(What::GraftRemoved {
            graft: name.to_owned().into(),
        });
        self.pool.disable(gid);
        Ok(())
    }

    /// Lists the pool, a row for each graft, and refused files of its directory, or why all of it is.
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
                let entry = self.pool.host_pool().find(&format!("{name}@{}", p.version));
                let signer = match entry.map(|e| &e.origin) {
                    _ if p.revoked => "revoked",
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
            .pool
            .host_pool()
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

    /// Describes one graft of the pool.
    fn describe(&mut self, wanted: &str) -> Result<Value, String> {
        let entry = find(self.pool.host_pool(), wanted)?;
        let m = &entry.manifest;
        let this = |p: &&Pooled| p.info.name == m.name && p.version == m.version;
        let pooled = self.pool.iter().find(this);
        let in_kernel = self.plane.grafts().find(|g| g.name == m.name);
        let deployed = in_kernel.zip(pooled);
        // Of a deployed graft, since its file may have been replaced.
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
