//! Kernel modules: which files a list of modules needs, in loading order.

use std::collections::{HashMap, HashSet};

/// The contents of `modules.dep` and `modules.builtin` of one kernel.
#[derive(Debug, Default)]
pub struct ModuleIndex {
    /// From a module's name to its path and the paths of its dependencies, as in `modules.dep`.
    entries: HashMap<String, (String, Vec<String>)>,
    builtin: HashSet<String>,
}

impl ModuleIndex {
    /// Parses the text of `modules.dep` and of `modules.builtin`.
    #[must_use]
    pub fn parse(dep: &str, builtin: &str) -> Self {
        let mut index = Self::default();
        for line in dep.lines() {
            if let Some((path, needs)) = line.split_once(':') {
                let needs = needs.split_whitespace().map(str::to_owned).collect();
                index
                    .entries
                    .insert(name_of(path), (path.to_owned(), needs));
            }
        }
        index.builtin = builtin.lines().map(name_of).collect();
        index
    }

    /// Returns the files to load for `wanted`, each once and after its dependencies, as paths
    /// relative to the directory of `modules.dep`. Built-in modules need no file.
    ///
    /// # Errors
    /// Returns the name of a module that this kernel does not have.
    pub fn closure<'a>(
        &self,
        wanted: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<String>, String> {
        let mut order = Vec::new();
        let mut seen = HashSet::new();
        for module in wanted {
            let name = name_of(module);
            match self.entries.get(&name) {
                Some((path, needs)) => {
                    // modules.dep is transitive, and a later entry is a dependency of the earlier
                    // ones.
                    for need in needs.iter().rev().chain([path]) {
                        if seen.insert(need.clone()) {
                            order.push(need.clone());
                        }
                    }
                }
                None if self.builtin.contains(&name) => {}
                None => return Err(module.to_owned()),
            }
        }
        Ok(order)
    }

    /// Returns the lines of `modules.dep` for these paths, as [`plain`] modules.
    #[must_use]
    pub fn dep_lines(&self, paths: &[String]) -> String {
        let mut text = String::new();
        for path in paths {
            if let Some((path, needs)) = self.entries.get(&name_of(path)) {
                let needs: Vec<_> = needs.iter().map(|need| plain(need)).collect();
                text.push_str(&format!("{}: {}\n", plain(path), needs.join(" ")));
            }
        }
        text
    }
}

/// Returns the path of a module once it is decompressed.
#[must_use]
pub fn plain(path: &str) -> &str {
    path.strip_suffix(".xz").unwrap_or(path)
}

/// Returns the name of a module: `b_c` for `kernel/a/b-c.ko.xz`, since the kernel does not
/// distinguish - and _.
fn name_of(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    let stem = file.split(".ko").next().unwrap_or(file);
    stem.trim().replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "kernel/a/kvm.ko: kernel/irqbypass.ko\nkernel/irqbypass.ko:\n\
                       kernel/a/kvm-amd.ko: kernel/ccp.ko kernel/a/kvm.ko kernel/irqbypass.ko\n\
                       kernel/ccp.ko:\n";

    #[test]
    fn what_a_module_needs_comes_before_it_and_once() {
        let index = ModuleIndex::parse(DEP, "kernel/fs/ext4.ko\n");
        let order = index.closure(["kvm", "kvm_amd", "ext4"]).unwrap();
        assert_eq!(
            order,
            [
                "kernel/irqbypass.ko",
                "kernel/a/kvm.ko",
                "kernel/ccp.ko",
                "kernel/a/kvm-amd.ko"
            ]
        );
    }

    #[test]
    fn a_module_that_the_kernel_does_not_have_is_named() {
        assert_eq!(
            ModuleIndex::parse(DEP, "").closure(["kvm", "zfs"]),
            Err("zfs".to_owned())
        );
    }

    #[test]
    fn dependency_lines_are_kept_for_the_chosen_paths_only() {
        let index = ModuleIndex::parse(DEP, "");
        let lines = index.dep_lines(&index.closure(["kvm"]).unwrap());
        assert_eq!(
            lines,
            "kernel/irqbypass.ko: \nkernel/a/kvm.ko: kernel/irqbypass.ko\n"
        );
    }

    #[test]
    fn dependency_lines_name_compressed_modules_as_they_are_when_decompressed() {
        let dep = "kernel/a/kvm.ko.xz: kernel/irqbypass.ko.xz\nkernel/irqbypass.ko.xz:\n";
        let index = ModuleIndex::parse(dep, "");
        let files = index.closure(["kvm"]).unwrap();
        assert_eq!(files, ["kernel/irqbypass.ko.xz", "kernel/a/kvm.ko.xz"]);
        assert_eq!(
            index.dep_lines(&files),
            "kernel/irqbypass.ko: \nkernel/a/kvm.ko: kernel/irqbypass.ko\n"
        );
    }
}
