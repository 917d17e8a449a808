//! Application profiles by the name of the program's file.

use super::Profile;

/// Programs with one purpose. Browsers, `curl`, `ssh` and interpreters are left out: they serve too many.
const TABLE: [(Profile, &[&str]); 4] = [
    (
        Profile::TimeSensitive,
        &[
            "baresip",
            "ffplay",
            "jami",
            "kodi",
            "linphone",
            "mpd",
            "mplayer",
            "mpv",
            "mumble",
            "obs",
            "rtmpdump",
            "skypeforlinux",
            "spotify",
            "streamlink",
            "teamspeak3",
            "vlc",
            "zoom",
        ],
    ),
    (
        Profile::TimeAndLossSensitive,
        &[
            "minetest",
            "openarena",
            "remmina",
            "rlogin",
            "steam",
            "telnet",
            "vncviewer",
            "xfreerdp",
        ],
    ),
    (
        Profile::LossSensitive,
        &[
            "aria2c",
            "borg",
            "deluged",
            "dnf",
            "duplicity",
            "evolution",
            "exim4",
            "fetchmail",
            "getmail",
            "git-remote-http",
            "git-remote-https",
            "irssi",
            "lftp",
            "mbsync",
            "msmtp",
            "mutt",
            "mysqldump",
            "mariadb-dump",
            "offlineimap",
            "pacman",
            "pg_basebackup",
            "pg_dump",
            "pg_restore",
            "pidgin",
            "qbittorrent",
            "rclone",
            "restic",
            "rsync",
            "scp",
            "sftp",
            "swaks",
            "thunderbird",
            "transmission-cli",
            "transmission-daemon",
            "transmission-gtk",
            "weechat",
            "wget",
        ],
    ),
    (
        Profile::Insensitive,
        &["faxsend", "faxq", "hfaxd", "sendfax"],
    ),
];

/// The class of an executable, by its path or name, and the name.
pub(super) fn class(executable: &str) -> Option<(Profile, &'static str)> {
    // As the kernel says it of a file that was replaced since.
    let path = executable.strip_suffix(" (deleted)").unwrap_or(executable);
    if ["/apt/methods/http", "/apt/methods/https"]
        .iter()
        .any(|method| path.ends_with(method))
    {
        return Some((Profile::LossSensitive, "apt"));
    }
    let name = path.rsplit('/').next().unwrap_or(path);
    TABLE.iter().find_map(|(profile, names)| {
        let name = names.iter().find(|n| **n == name)?;
        Some((*profile, *name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class__goes_by_the_file_s_name() {
        let class = |path| class(path).map(|(profile, _)| profile);
        assert_eq!(class("/usr/bin/rsync"), Some(Profile::LossSensitive));
        assert_eq!(class("mpv (deleted)"), Some(Profile::TimeSensitive));
        assert_eq!(
            class("/usr/lib/apt/methods/https"),
            Some(Profile::LossSensitive)
        );
        for none in ["", "/", "/usr/bin/", "/opt/https", "rsync2", "RSYNC"] {
            assert_eq!(class(none), None, "{none}");
        }
    }
}
