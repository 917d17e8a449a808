//! A thread for work that takes milliseconds: reading packages and checking their signatures, the verifier,
//! attaching to interfaces. The broker's thread opens and ends sessions meanwhile.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use vtl_bpf::{
    check,
    fence::Fence,
    load::{Attachment, LoadedGraft, Loader, Steps},
    netdev::{self, Interface},
    plane::Ingress,
};
use vtl_control::Deployed;
use vtl_pool::{
    Manifest, Package, Pool,
    key::Trust,
    pool::{Entry, Origin, store},
};

use super::{Question, Reply};
use crate::{Scope, panics::test_point};

/// Graft to deploy.
pub(super) enum Wanted {
    /// A graft of the pool: `NAME` or `NAME@VERSION`.
    Named(String),
    /// A package, added to the pool if it can be deployed.
    Package(Vec<u8>),
}

enum Order {
    Launch {
        gid: u16,
        image: Arc<[u8]>,
    },
    Deploy {
        wanted: Wanted,
        swap: bool,
        reply: Reply<Deployed>,
    },
    Keep {
        package: Box<NewPackage>,
        answer: Deployed,
        reply: Reply<Deployed>,
    },
    /// Read the pool's directory again, for this question.
    Read(Question),
    /// Attach to interfaces other than these, whose MTUs these are.
    Interfaces(BTreeMap<u32, u32>),
}

/// Result of an order.
pub(super) enum News {
    /// A graft of the pool has been loaded, or failed to.
    Launched {
        gid: u16,
        image: Arc<[u8]>,
        loaded: Result<LoadedGraft, String>,
        took: Duration,
    },
    /// A graft is ready to be deployed.
    Deployable(Box<Deployable>),
    /// The pool has been read, or failed to be: the question can be answered.
    Read {
        host_pool: Result<Pool, String>,
        question: Question,
    },
    /// Interfaces with newly attached root programs, those that have another MTU, with that, and those that have gone.
    Interfaces {
        new: Vec<Attachment>,
        resized: Vec<(u32, u32)>,
        gone: Vec<u32>,
    },
}

/// A graft that the kernel has verified for `vtl graft deploy` or `swap`.
pub(super) struct Deployable {
    pub(super) host_pool: Pool,
    pub(super) entry: Entry,
    pub(super) loaded: LoadedGraft,
    /// The package to add to the pool's directory, if new.
    pub(super) package: Option<NewPackage>,
    /// Replace another version, which must be deployed.
    pub(super) swap: bool,
    pub(super) started: Instant,
    pub(super) reply: Reply<Deployed>,
}

/// A package for the pool's directory.
pub(super) struct NewPackage {
    manifest: Manifest,
    bytes: Vec<u8>,
}

/// Handle of the thread.
pub(super) struct Launcher {
    orders: Sender<Order>,
    news: Receiver<News>,
    /// Grafts being loaded.
    launching: BTreeSet<u16>,
    /// Attaching to interfaces is in progress.
    looking: bool,
    /// Interfaces have changed since it began.
    changed: bool,
}

/// The thread's side.
pub(super) struct Workshop {
    pub(super) loader: Arc<Loader>,
    pub(super) ingress: Ingress,
    /// The interfaces that VTL uses.
    pub(super) scope: Scope,
    /// Restricts control packets to these interfaces, unless VTL uses all.
    pub(super) fence: Option<Fence>,
    /// All versions of all grafts that this host may use.
    pub(super) host_pool: Pool,
    /// The directory of packages.
    pub(super) pool: PathBuf,
    /// The directory of the keys that sign packages.
    pub(super) keys: PathBuf,
}

impl Launcher {
    /// Starts the thread, which calls `call` when there is news.
    pub(super) fn start(workshop: Workshop, call: impl Fn() + Send + 'static) -> Self {
        let (orders, inbox) = mpsc::channel();
        let (outbox, news) = mpsc::channel();
        thread::Builder::new()
            .name("vtl-launcher".into())
            .spawn(move || workshop.run(&inbox, &outbox, call))
            .expect("a thread can be started");
        Self {
            orders,
            news,
            launching: BTreeSet::new(),
            looking: false,
            changed: false,
        }
    }

    fn order(&self, order: Order) {
        // The thread ends with the daemon only.
        let _ = self.orders.send(order);
    }

    /// Loads a graft, unless that is in progress. [`News::Launched`] follows.
    pub(super) fn launch(&mut self, gid: u16, image: &Arc<[u8]>) {
        if self.launching.insert(gid) {
            let image = Arc::clone(image);
            self.order(Order::Launch { gid, image });
        }
    }

    /// Loads and verifies a graft for deployment. [`News::Deployable`] follows, or an error is sent to `reply`.
    pub(super) fn deploy(&self, wanted: Wanted, swap: bool, reply: Reply<Deployed>) {
        self.order(Order::Deploy {
            wanted,
            swap,
            reply,
        });
    }

    /// Stores a package in the pool's directory, then sends the answer.
    pub(super) fn keep(&self, package: NewPackage, answer: Deployed, reply: Reply<Deployed>) {
        let package = Box::new(package);
        self.order(Order::Keep {
            package,
            answer,
            reply,
        });
    }

    /// Reads the pool's directory again for a question. [`News::Read`] follows.
    pub(super) fn read(&self, question: Question) {
        self.order(Order::Read(question));
    }

    /// Attaches to interfaces that are not `known`, by their MTUs. [`News::Interfaces`] follows.
    pub(super) fn look(&mut self, known: BTreeMap<u32, u32>) {
        self.changed = self.looking;
        if !self.looking {
            self.looking = true;
            self.order(Order::Interfaces(known));
        }
    }

    /// Returns the next result.
    pub(super) fn news(&mut self) -> Option<News> {
        let news = self.news.try_recv().ok()?;
        match &news {
            News::Launched { gid, .. } => {
                self.launching.remove(gid);
            }
            News::Interfaces { .. } => self.looking = false,
            News::Deployable(_) | News::Read { .. } => {}
        }
        Some(news)
    }

    /// Whether interfaces have changed while attaching; resets that.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }
}

impl Workshop {
    fn run(mut self, inbox: &Receiver<Order>, outbox: &Sender<News>, call: impl Fn()) {
        while let Ok(order) = inbox.recv() {
            test_point();
            let news = match order {
                Order::Launch { gid, image } => {
                    let started = Instant::now();
                    let loaded = self.loader.load(&image, &mut Steps::default());
                    Some(News::Launched {
                        gid,
                        image,
                        loaded: loaded.map_err(|e| e.to_string()),
                        took: started.elapsed(),
                    })
                }
                Order::Deploy {
                    wanted,
                    swap,
                    reply,
                } => self.deploy(wanted, swap, reply),
                Order::Keep {
                    package,
                    answer,
                    reply,
                } => {
                    if let Err(error) = store(&self.pool, &package.manifest, &package.bytes) {
                        tracing::warn!(%error, "pool: the package is deployed, but cannot be stored: it is gone after a restart");
                    }
                    let _ = reply.send(Ok(answer));
                    None
                }
                Order::Read(question) => Some(News::Read {
                    host_pool: self.read().map(|_| self.host_pool.clone()),
                    question,
                }),
                Order::Interfaces(known) => Some(self.look(&known)),
            };
            if let Some(news) = news {
                if outbox.send(news).is_err() {
                    return;
                }
                call();
            }
        }
    }

    /// Reads the pool's directory and the trusted keys again.
    pub(super) fn read(&mut self) -> Result<Trust, String> {
        let trust = Trust::read(&self.keys).map_err(|e| e.to_string())?;
        for error in &trust.left_out {
            tracing::warn!(%error, "pool: key ignored");
        }
        if let Some(error) = trust.revocations().unusable() {
            tracing::warn!(
                error,
                "pool: revoked.toml cannot be used: all packages refused"
            );
        }
        self.host_pool
            .refresh(&self.pool, &trust)
            .map_err(|e| e.to_string())?;
        Ok(trust)
    }

    fn deploy(&mut self, wanted: Wanted, swap: bool, reply: Reply<Deployed>) -> Option<News> {
        let started = Instant::now();
        let verified = self.entry(wanted).and_then(|(entry, package)| {
            let loaded = self.verify(&entry)?;
            Ok((entry, package, loaded))
        });
        match verified {
            Ok((entry, package, loaded)) => Some(News::Deployable(Box::new(Deployable {
                host_pool: self.host_pool.clone(),
                entry,
                loaded,
                package,
                swap,
                started,
                reply,
            }))),
            Err(why) => {
                let _ = reply.send(Err(why));
                None
            }
        }
    }

    /// Finds the wanted graft; returns the package, too, if it is yet to be added to the pool.
    fn entry(&mut self, wanted: Wanted) -> Result<(Entry, Option<NewPackage>), String> {
        let trust = self.read()?;
        let bytes = match wanted {
            Wanted::Named(name) => return Ok((find(&self.host_pool, &name)?, None)),
            Wanted::Package(bytes) => bytes,
        };
        let (package, signer) = Package::open(&bytes, &trust).map_err(|e| e.to_string())?;
        let identity = Some(package.identity());
        let manifest = package.manifest;
        self.host_pool.fits(&manifest).map_err(|e| e.to_string())?;
        let path = self.pool.join(manifest.file_name());
        let entry = Entry {
            manifest: manifest.clone(),
            rank: package.description.rank,
            object: package.object.into(),
            origin: Origin::Package { path, signer },
            identity,
        };
        Ok((entry, Some(NewPackage { manifest, bytes })))
    }

    /// Loads a graft, so that the kernel verifies it. A refusal names the source line that the verifier
    /// rejects, which takes time to find.
    fn verify(&self, entry: &Entry) -> Result<LoadedGraft, String> {
        let image = &entry.object;
        let refused = match self.loader.load(image, &mut Steps::default()) {
            Ok(loaded) => return Ok(loaded),
            Err(refused) => refused,
        };
        let verdicts = check::check(&self.loader, image).unwrap_or_default();
        let complaint = verdicts.iter().find_map(check::Verdict::complaint);
        Err(complaint.map_or_else(
            || refused.to_string(),
            |why| {
                format!(
                    "the kernel refuses graft \"{}\": {why}",
                    entry.manifest.name
                )
            },
        ))
    }

    fn look(&self, known: &BTreeMap<u32, u32>) -> News {
        let there = netdev::interfaces().unwrap_or_else(|error| {
            tracing::warn!(%error, "interfaces: cannot list them");
            Vec::new()
        });
        self.move_fence();
        let is_new = |i: &&Interface| !known.contains_key(&i.index) && self.scope.has(&i.name);
        let attach = |i: &Interface| {
            let attached = self.loader.attach(i, self.ingress);
            // The interface may have gone again.
            let failed =
                |error: &_| tracing::warn!(%error, interface = i.name, "interfaces: cannot attach");
            attached.inspect_err(failed).ok()
        };
        // Or renamed.
        let gone = |index: &u32| !self.scope.has_index(*index);
        let is_resized = |i: &&Interface| known.get(&i.index).is_some_and(|mtu| *mtu != i.mtu);
        let resized = there.iter().filter(is_resized);
        News::Interfaces {
            new: there.iter().filter(is_new).filter_map(attach).collect(),
            resized: resized.map(|i| (i.index, i.mtu)).collect(),
            gone: known.keys().copied().filter(gone).collect(),
        }
    }

    /// Updates the fence to the current interfaces.
    fn move_fence(&self) {
        let Some(fence) = &self.fence else { return };
        let moved = self.scope.inside().map_err(|error| error.to_string());
        let moved = moved.and_then(|inside| fence.set(&inside).map_err(|error| error.to_string()));
        if let Err(error) = moved {
            tracing::warn!(
                error,
                "interfaces: cannot admit new ones to VTL's ports: peers behind them have plain TCP"
            );
        }
    }
}

/// Finds a graft of the pool by `NAME` or `NAME@VERSION`.
pub(super) fn find(host_pool: &Pool, wanted: &str) -> Result<Entry, String> {
    if let Some(entry) = host_pool.find(wanted) {
        return Ok(entry.clone());
    }
    let name = wanted.split('@').next().unwrap_or_default();
    let refused = host_pool.refused().iter().find(|(path, _)| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        file.strip_prefix(name)
            .is_some_and(|rest| rest.starts_with('-'))
    });
    Err(match refused {
        Some((path, why)) => format!("{} is refused: {why}", path.display()),
        None => format!("the pool has no graft \"{wanted}\": vtl graft list shows it"),
    })
}
