//! Whether carriers are chosen by the model (`vtl select on`, `off`), and whether flows teach (`vtl select learn on`, `off`):
//! switches that outlive the daemon.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// File in the state directory that is there while the choice is off.
const FILE: &str = "select.off";
/// Its content, for people.
const CONTENT: &str = "vtl select off: connections of the carrier auto go by TCP. vtl select on\n";

/// The same of learning.
const LEARN_FILE: &str = "learn.off";
const LEARN_CONTENT: &str = "vtl select learn off: flows teach nothing. vtl select learn on\n";

/// The switches. Several daemons may have one state directory, each in a network namespace of its own: each starts with what
/// the last change of any of them has left.
#[derive(Debug)]
pub struct Selection {
    choice: Switch,
    learning: Switch,
}

impl Selection {
    /// The switches as they were set last. `state`: the state directory.
    pub fn open(state: &Path) -> Self {
        Self {
            choice: Switch::open(state.join(FILE), CONTENT),
            learning: Switch::open(state.join(LEARN_FILE), LEARN_CONTENT),
        }
    }

    /// Whether carriers are chosen.
    pub fn is_on(&self) -> bool {
        self.choice.is_on()
    }

    /// Whether flows teach, too.
    pub fn learns(&self) -> bool {
        self.is_on() && self.learning.is_on()
    }

    /// Sets whether carriers are chosen.
    ///
    /// # Errors
    /// The file of the switch cannot be written or removed: it is off then.
    pub fn set(&self, is_on: bool) -> Result<(), String> {
        self.choice.set(is_on)
    }

    /// Sets whether flows teach.
    ///
    /// # Errors
    /// The file of the switch cannot be written or removed: it is off then.
    pub fn set_learns(&self, is_on: bool) -> Result<(), String> {
        self.learning.set(is_on)
    }
}

/// A switch that outlives the daemon, by a file that is there while it is off.
#[derive(Debug)]
struct Switch {
    is_on: AtomicBool,
    file: PathBuf,
    content: &'static str,
    /// Serialises changes.
    changing: Mutex<()>,
}

impl Switch {
    fn open(file: PathBuf, content: &'static str) -> Self {
        // If the file system does not say, it is off: the switch is for when something is wrong.
        let is_off = file.try_exists().unwrap_or(true);
        Self {
            is_on: AtomicBool::new(!is_off),
            file,
            content,
            changing: Mutex::default(),
        }
    }

    fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Sets the switch.
    ///
    /// # Errors
    /// The file cannot be written or removed. It is then off: where it was to be switched off, until this daemon ends.
    fn set(&self, is_on: bool) -> Result<(), String> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_on {
            self.is_on.store(false, Ordering::Relaxed);
        }
        let kept = match is_on {
            true => fs::remove_file(&self.file),
            false => fs::write(&self.file, self.content).and_then(|()| synced(&self.file)),
        };
        let kept = match kept {
            Err(error) if is_on && error.kind() == io::ErrorKind::NotFound => Ok(()),
            kept => kept,
        };
        kept.map_err(|error| {
            let file = self.file.display();
            format!("select: it is off, but a restart of vtld may change that: {file}: {error}")
        })?;
        self.is_on.store(is_on, Ordering::Relaxed);
        Ok(())
    }
}

/// Writes a file and its directory to the disk.
fn synced(file: &Path) -> io::Result<()> {
    fs::File::open(file)?.sync_all()?;
    match file.parent() {
        Some(folder) => fs::File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory that vanishes with its owner.
    struct State(PathBuf);

    impl State {
        fn new(name: &str) -> Self {
            let name = format!("vtld-select-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::create_dir_all(&path).expect("a directory");
            Self(path)
        }
    }

    impl Drop for State {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn set__outlives_the_daemon() {
        let state = State::new("kept");
        let open = || Selection::open(&state.0);
        assert!(open().is_on(), "unless it was set otherwise");
        for is_on in [false, false, true, true, false] {
            let selection = open();
            selection.set(is_on).expect("set");
            assert_eq!([selection.is_on(), open().is_on()], [is_on; 2]);
        }
    }

    #[test]
    fn set_learns__is_a_switch_of_its_own() {
        let state = State::new("learns");
        let selection = Selection::open(&state.0);
        assert!(selection.learns());
        selection.set_learns(false).expect("set");
        assert!(selection.is_on() && !selection.learns());
        assert!(!Selection::open(&state.0).learns());
        selection.set_learns(true).expect("set");
        // Nothing is learnt while nothing is chosen.
        selection.set(false).expect("set");
        assert!(!selection.learns());
    }

    #[test]
    fn set__off_is_off_also_where_it_cannot_be_kept() {
        let state = State::new("lost");
        let selection = Selection::open(&state.0.join("none"));
        assert!(selection.is_on());
        let error = selection.set(false).expect_err("no directory");
        assert!(error.contains("select.off"), "{error}");
        assert!(!selection.is_on());
        assert!(selection.set(true).is_ok() && selection.is_on());
    }
}
