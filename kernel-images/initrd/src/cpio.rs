//! A writer of cpio archives in the "newc" format, which the kernel unpacks as initramfs
//! (Documentation/driver-api/early-userspace/buffer-format.rst in the kernel's source).
//!
//! Device nodes and owners are written as given, so no privileges are needed, and the same input
//! gives the same bytes.

use std::collections::HashSet;
use std::io::{self, Write};

const S_IFCHR: u32 = 0o020_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFLNK: u32 = 0o120_000;

/// An archive that is being written to `out`.
#[derive(Debug)]
pub struct Archive<W: Write> {
    out: W,
    next_inode: u32,
    directories: HashSet<String>,
}

impl<W: Write> Archive<W> {
    /// Begins an archive.
    pub fn new(out: W) -> Self {
        Self {
            out,
            next_inode: 1,
            directories: HashSet::new(),
        }
    }

    /// Adds a directory and its parents, unless they exist.
    ///
    /// # Errors
    /// Fails when the output does.
    pub fn directory(&mut self, path: &str) -> io::Result<()> {
        let mut at = 0;
        loop {
            let end = path[at..].find('/').map_or(path.len(), |i| at + i);
            if end > 0 && self.directories.insert(path[..end].to_owned()) {
                self.entry(&path[..end], S_IFDIR | 0o755, (0, 0), &[])?;
            }
            if end == path.len() {
                return Ok(());
            }
            at = end + 1;
        }
    }

    /// Adds a regular file with this mode (such as `0o755`).
    ///
    /// # Errors
    /// Fails when the output does, or the file has 4 GiB or more.
    pub fn file(&mut self, path: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
        self.parents(path)?;
        self.entry(path, S_IFREG | mode, (0, 0), bytes)
    }

    /// Adds a symbolic link.
    ///
    /// # Errors
    /// Fails when the output does.
    pub fn symlink(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.parents(path)?;
        self.entry(path, S_IFLNK | 0o777, (0, 0), target.as_bytes())
    }

    /// Adds a character device.
    ///
    /// # Errors
    /// Fails when the output does.
    pub fn character_device(
        &mut self,
        path: &str,
        mode: u32,
        major: u32,
        minor: u32,
    ) -> io::Result<()> {
        self.parents(path)?;
        self.entry(path, S_IFCHR | mode, (major, minor), &[])
    }

    /// Ends the archive and returns the output.
    ///
    /// # Errors
    /// Fails when the output does.
    pub fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn parents(&mut self, path: &str) -> io::Result<()> {
        match path.rfind('/') {
            Some(end) => self.directory(&path[..end]),
            None => Ok(()),
        }
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), bytes: &[u8]) -> io::Result<()> {
        let too_large = |_| io::Error::other(format!("{path}: too large for a cpio archive"));
        let size = u32::try_from(bytes.len()).map_err(too_large)?;
        let name_size = u32::try_from(path.len() + 1).map_err(too_large)?;
        let links = if mode & S_IFDIR == S_IFDIR { 2 } else { 1 };
        let fields = [
            self.next_inode,
            mode,
            0,
            0,
            links,
            0,
            size,
            0,
            0,
            device.0,
            device.1,
            name_size,
            0,
        ];
        self.next_inode += 1;
        write!(self.out, "070701")?;
        for field in fields {
            write!(self.out, "{field:08x}")?;
        }
        self.out.write_all(path.as_bytes())?;
        self.out.write_all(&[0])?;
        // Header (110 bytes) and name together, and the data, are padded to four bytes.
        self.pad(110 + path.len() + 1)?;
        self.out.write_all(bytes)?;
        self.pad(bytes.len())
    }

    fn pad(&mut self, written: usize) -> io::Result<()> {
        self.out.write_all(&[0; 3][..(4 - written % 4) % 4])
    }
}

#[cfg(test)]
mod tests {
    use std::io::Seek;
    use std::process::Command;

    use super::*;

    #[test]
    fn the_cpio_command_lists_what_was_written() {
        let mut archive = Archive::new(Vec::new());
        archive.file("bin/tool", 0o755, b"12345").unwrap();
        archive.symlink("bin/sh", "tool").unwrap();
        archive
            .character_device("dev/console", 0o600, 5, 1)
            .unwrap();
        archive.directory("a/b").unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&archive.finish().unwrap()).unwrap();
        file.rewind().unwrap();
        let mut cpio = Command::new("cpio");
        cpio.args(["-t", "-v", "--quiet"]).env("LC_ALL", "C");
        let listed = cpio.stdin(file).output().expect("cpio is installed");
        assert!(listed.status.success(), "{listed:?}");
        let list = String::from_utf8(listed.stdout).unwrap();
        let lines: Vec<&str> = list.lines().collect();
        assert_eq!(lines.len(), 7, "{list}");
        assert!(
            lines[0].starts_with("drwxr-xr-x   2") && lines[0].ends_with(" bin"),
            "{list}"
        );
        assert!(
            lines[1].starts_with("-rwxr-xr-x   1") && lines[1].contains(" 5 "),
            "{list}"
        );
        assert!(lines[2].ends_with("bin/sh -> tool"), "{list}");
        assert!(
            lines[4].starts_with("crw-------") && lines[4].contains("5,   1"),
            "{list}"
        );
    }
}
