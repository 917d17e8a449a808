//! Does on a thread of its own what takes milliseconds: reading packages and checking their
//! signatures, the verifier, attaching to interfaces. The broker's thread moves packets meanwhile.

use std::{
    collections::BTreeSet,
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

/// What to put into the kernel.
pub(super) enum Wanted {
    /// A graft of the pool: `NAME` or `NAME@VERSION`.
    Named(String),
    /// A package, which joins the pool if all goes well.
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
    /// Read the pool anew, for this question.
    Read(Question),
    /// Look for interfaces other than these.
    Interfaces(BTreeSet<u32>),
}

/// What the thread has done.
pub(super) enum News {
    /// A graft of the pool was to be loaded.
    Launched {
        gid: u16,
        image: Arc<[u8]>,
        loaded: Result<LoadedGraft, String>,
        took: Duration,
    },
    /// A graft is ready to be deployed.
    Deployable(Box<Deployable>),
    /// The pool was read, unless there is a reason why not, and the question can be answered.
    Read {
        library: Result<Pool, String>,
        question: Question,
    },
    /// There are interfaces that the root programs are attached to now, and some have gone.
    Interfaces {
        new: Vec<Attachment>,
        gone: Vec<u32>,
    },
}

/// A graft that the kernel has verified for `vtl graft deploy` or `swap`.
pub(super) struct Deployable {
    pub(super) library: Pool,
    pub(super) entry: Entry,
    pub(super) loaded: LoadedGraft,
    /// It is not in the pool's directory yet.
    pub(super) package: Option<NewPackage>,
    /// In place of another version, which must be there.
    pub(super) swap: bool,
    pub(super) started: Instant,
    pub(super) reply: Reply<Deployed>,
}

/// A package for the pool's directory.
pub(super) struct NewPackage {
    manifest: Manifest,
    bytes: Vec<u8>,
}

/// The way to the thread.
pub(super) struct Launcher {
    orders: Sender<Order>,
    news: Receiver<News>,
    /// Grafts that are being loaded.
    launching: BTreeSet<u16>,
    /// Interfaces are being looked at.
    looking: bool,
    /// They have changed since.
    changed: bool,
}

/// The thread's side.
pub(super) struct Workshop {
    pub(super) loader: Arc<Loader>,
    pub(super) ingress: Ingress,
    /// The interfaces that VTL is for.
    pub(super) scope: Scope,
    /// What keeps it to them, if it is not for all.
    pub(super) fence: Option<Fence>,
    /// All versions of all grafts that this host may use.
    pub(super) library: Pool,
    /// The directory of packages.
    pub(super) pool: PathBuf,
    /// The directory of the keys that they must be signed with.
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

    /// Has a graft loaded, unless that is being done. [`News::Launched`] follows.
    pub(super) fn launch(&mut self, gid: u16, image: &Arc<[u8]>) {
        if self.launching.insert(gid) {
            let image = Arc::clone(image);
            self.order(Order::Launch { gid, image });
        }
    }

    /// Has a graft made ready to be deployed. [`News::Deployable`] follows, or the answer says why
    /// not.
    pub(super) fn deploy(&self, wanted: Wanted, swap: bool, reply: Reply<Deployed>) {
        self.order(Order::Deploy {
            wanted,
            swap,
            reply,
        });
    }

    /// Puts a package into the pool's directory, then answers.
    pub(super) fn keep(&self, package: NewPackage, answer: Deployed, reply: Reply<Deployed>) {
        let package = Box::new(package);
        self.order(Order::Keep {
            package,
            answer,
            reply,
        });
    }

    /// Has the pool read anew for a question. [`News::Read`] follows.
    pub(super) fn read(&self, question: Question) {
        self.order(Order::Read(question));
    }

    /// Has interfaces attached to that are not `known`. [`News::Interfaces`] follows.
    pub(super) fn look(&mut self, known: BTreeSet<u32>) {
        self.changed = self.looking;
        if !self.looking {
            self.looking = true;
            self.order(Order::Interfaces(known));
        }
    }

    /// What the thread has done since.
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

    /// Whether interfaces have changed while others were looked at.
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
                        tracing::warn!(%error, "the package is in the kernel, but not in the pool");
                    }
                    let _ = reply.send(Ok(answer));
                    None
                }
                Order::Read(question) => Some(News::Read {
                    library: self.read().map(|_| self.library.clone()),
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

    /// Reads the pool's directory and the trusted keys anew.
    pub(super) fn read(&mut self) -> Result<Trust, String> {
        let trust = Trust::read(&self.keys).map_err(|e| e.to_string())?;
        for error in &trust.left_out {
            tracing::warn!(%error, "a key is not trusted");
        }
        if let Some(error) = trust.revocations().unusable() {
            tracing::warn!(error, "no package is taken: the revocations cannot be used");
        }
        self.library
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
                library: self.library.clone(),
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

    /// What is meant, and whether it is yet to join the pool.
    fn entry(&mut self, wanted: Wanted) -> Result<(Entry, Option<NewPackage>), String> {
        let trust = self.read()?;
        let bytes = match wanted {
            Wanted::Named(name) => return Ok((find(&self.library, &name)?, None)),
            Wanted::Package(bytes) => bytes,
        };
        let (package, signer) = Package::open(&bytes, &trust).map_err(|e| e.to_string())?;
        let identity = Some(package.identity());
        let manifest = package.manifest;
        self.library.fits(&manifest).map_err(|e| e.to_string())?;
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

    /// Has the kernel verify a graft. A refusal names the line that the verifier stumbled over,
    /// which takes time.
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

    fn look(&self, known: &BTreeSet<u32>) -> News {
        let there = netdev::interfaces().unwrap_or_else(|error| {
            tracing::warn!(%error, "no interfaces to attach to");
            Vec::new()
        });
        self.move_fence();
        let is_new = |i: &&Interface| !known.contains(&i.index) && self.scope.has(&i.name);
        let attach = |i: &Interface| {
            let attached = self.loader.attach(i, self.ingress);
            // It may have gone again.
            let failed = |error: &_| tracing::warn!(%error, interface = i.name, "not attached");
            attached.inspect_err(failed).ok()
        };
        // Or it has another name now.
        let gone = |index: &u32| !self.scope.has_index(*index);
        News::Interfaces {
            new: there.iter().filter(is_new).filter_map(attach).collect(),
            gone: known.iter().copied().filter(gone).collect(),
        }
    }

    /// Has the fence follow the interfaces.
    fn move_fence(&self) {
        let Some(fence) = &self.fence else { return };
        let moved = self.scope.inside().map_err(|error| error.to_string());
        let moved = moved.and_then(|inside| fence.set(&inside).map_err(|error| error.to_string()));
        if let Err(error) = moved {
            tracing::warn!(error, "peers behind new interfaces have plain TCP");
        }
    }
}

/// A graft of the pool, by `NAME` or `NAME@VERSION`.
pub(super) fn find(library: &Pool, wanted: &str) -> Result<Entry, String> {
    if let Some(entry) = library.find(wanted) {
        return Ok(entry.clone());
    }
    let name = wanted.split('@').next().unwrap_or_default();
    let refused = library.refused().iter().find(|(path, _)| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        file.strip_prefix(name)
            .is_some_and(|rest| rest.starts_with('-'))
    });
    Err(match refused {
        Some((path, why)) => format!("{} is refused: {why}", path.display()),
        None => format!("the pool has no graft \"{wanted}\": vtl graft list shows it"),
    })
}
