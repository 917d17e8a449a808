//! What the application of a captured connect executes, as the programs saw it.

use vtl_core::profile::Program;

use super::abi::vtl_exe;

/// What an application executes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Executable {
    /// The file.
    pub program: Program,
    /// Its name, without folders; cut after 31 bytes.
    pub name: String,
}

impl Executable {
    /// `None`: the programs could not see it.
    pub(super) fn of(exe: &vtl_exe) -> Option<Self> {
        let name = exe.name.iter().take_while(|byte| **byte != 0);
        let name: Vec<u8> = name.map(|byte| *byte as u8).collect();
        (exe.inode != 0).then(|| Self {
            program: Program {
                device: exe.dev,
                inode: exe.inode,
            },
            name: String::from_utf8_lossy(&name).into_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of__takes_the_name_up_to_its_end() {
        let mut exe = vtl_exe {
            dev: 3,
            ..vtl_exe::default()
        };
        assert_eq!(Executable::of(&exe), None);
        exe.inode = 7;
        for (to, byte) in exe.name.iter_mut().zip(b"ffmpeg\0rest") {
            *to = *byte as _;
        }
        let seen = Executable::of(&exe).expect("seen");
        assert_eq!((seen.name.as_str(), seen.program.inode), ("ffmpeg", 7));
        // A name that was cut has no end, and may be cut within a letter.
        exe.name.fill(b'a' as _);
        exe.name[31] = 0xc3_u8 as _;
        let seen = Executable::of(&exe).expect("seen");
        assert!(seen.name.starts_with("aaa") && seen.name.ends_with('\u{fffd}'));
    }
}
