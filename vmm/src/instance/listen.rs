//! The control socket of a VM.

use std::sync::Arc;

use super::vm::Instance;
use super::vm_routes::ROUTES;
use crate::config::RunConfig;
use crate::control_socket::directory::{Directory, DirectoryError, Kind};
use crate::control_socket::route::Service;
use crate::control_socket::server::{Server, ServerError};
use crate::exit::ExitCode;
use crate::failure::{Failure, describe};

/// Starts the control socket, if a directory is usable. A name that another VM has is refused
/// before anything is started.
pub fn listen(config: &RunConfig, instance: &Arc<Instance>) -> Result<Option<Server>, Failure> {
    let service = Service {
        subject: Arc::clone(instance),
        routes: ROUTES,
    };
    let start = || {
        let directory = Directory::for_listening()?;
        // A login session and a service of one user listen in different directories.
        let _locks = Directory::lock_all()?;
        if let Some(name) = &config.name
            && let Some(other) = Directory::vm_named(name)?
        {
            return Err(ServerError::NameTaken {
                name: name.clone(),
                pid: other.pid,
            });
        }
        Server::start_locked(&directory, Kind::Vm, config.name.as_ref(), service)
    };
    match start() {
        Ok(server) => Ok(Some(server)),
        Err(error @ ServerError::NameTaken { .. }) => Err(Failure::new(ExitCode::Usage, error)),
        // It is then unknown whether another VM has the name.
        Err(error @ ServerError::Directory(DirectoryError::Locked { .. }))
            if config.name.is_some() =>
        {
            Err(error.into())
        }
        Err(error) => {
            tracing::warn!(
                "`ssi-hv status` will not find this VM: {}",
                describe(&error)
            );
            Ok(None)
        }
    }
}
